"""Trainer: when to step, log, evaluate, save and stop. What these are, others know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.save import Snapshot
from megatron_lite.config.batch import global_batch_size_at, num_microbatches, train_iters
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.loader import MicroBatch
from megatron_lite.data.training_order import TrainingOrder
from megatron_lite.engine.interface import Engine, StepOutcome
from megatron_lite.engine.lr_schedule import batch_scaling_factor, learning_rate
from megatron_lite.engine.measures import Measures
from megatron_lite.forensics import Taken
from megatron_lite.guard import Fault, Guard, TrainingStopped
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.stopping import StopRequest
from megatron_lite.health.time_limit import TimeLimit
from megatron_lite.hidden_shape import hidden_shape
from megatron_lite.monitoring.profiler import Profiler, phase
from megatron_lite.monitoring.timers import StepTimer
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.mappings import all_reduce
from megatron_lite.mpu.random import RngStreams
from megatron_lite.mpu.reductions import any_rank, mean_over_tokens
from megatron_lite.pipeline.executor import Compute, PipelineExecutor, Program
from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.progress import Progress
from megatron_lite.replica_check import replica_faults
from megatron_lite.report import Reporter
from megatron_lite.rewinding import Rewinder
from megatron_lite.saving import Saver

Part = Literal["valid", "test"]


@dataclass
class Trainer:
    """One rank's loop. Everything it needs is handed in by build.py."""

    config: RunConfig
    resolved: Mapping[str, Any]
    """The config as plain JSON values, which a checkpoint keeps."""
    origins: Mapping[str, str]
    """Where each of them was written."""
    groups: ProcessGroups
    node: str
    """What people call this machine."""
    engine: Engine
    executor: PipelineExecutor
    plan: SchedulePlan
    streams: RngStreams
    order: TrainingOrder
    """Which samples those batches are."""
    train_batches: Iterator[MicroBatch]
    evaluations: Mapping[Part, Callable[[], Iterator[MicroBatch]]]
    """This rank's micro-batches of a part, anew at each call; every rank gets the same number."""
    report: Reporter
    progress: Progress
    saver: Saver
    guard: Guard
    rewinder: Rewinder
    timer: StepTimer
    device: torch.device
    stop: StopRequest
    time_limit: TimeLimit
    heartbeat: Heartbeat
    measures: Measures
    profiler: Profiler
    left_because: str | None = None
    """Why training ended before its end."""
    _programs: dict[tuple[str, int], Program] = field(default_factory=dict)
    _began_at: int = 0
    _step_seconds: float = 0.0
    """Of the last step."""
    _logged_samples: int = 0

    def fit(self) -> Literal["done", "requeue"]:
        """Train to the end, or until asked to leave or out of time (then "requeue").

        TrainingStopped, on all ranks alike, where going on makes no sense.
        """
        try:
            return self._fit()
        except (TrainingStopped, CheckpointError) as stopped:  # all ranks have agreed on it
            self.heartbeat.at("save")
            try:
                self.saver.finish()  # a save on its way is worth having
            except CheckpointError as error:
                raise TrainingStopped(f"{stopped}. The save on its way failed: {error}") from error
            finally:
                self.end_trace()
            raise
        finally:  # a rank that fails by itself can wait for no other
            self.profiler.stop()
            self.profiler.write()

    def _fit(self) -> Literal["done", "requeue"]:
        self.saver.nothing_new(self.progress.iteration)
        self._began_at = self.progress.iteration
        self._logged_samples = self.progress.consumed_samples
        total = train_iters(self.config.training)
        if self.progress.evaluation_due and "valid" in self.evaluations:
            self.evaluate("valid")  # so that a curve has no gap where the run had left
        while self.progress.iteration < total and not self._must_leave():
            before, begun = self.progress.iteration, time.monotonic()
            self.iteration(total)
            self._step_seconds = time.monotonic() - begun
            if self.progress.iteration <= before:
                continue  # it went back, to where all the following was done
            if self._due(self.config.training.check_replicas_interval):
                self.check_replicas()
            self.saver.finish_written()
            if self._due(self.config.training.eval_interval) and "valid" in self.evaluations:
                self.evaluate("valid")
            if self._due(self.config.checkpoint.save_interval):
                self.save()
            if self.profiler.is_full:
                self.end_trace()
        self.stop.answered.set()  # nobody polls any more, and the end is near
        if self.progress.iteration == total and "test" in self.evaluations:
            self.end_trace()  # it would hold the whole test
            known = self._began_at == total and self.report.holds("test", self.progress)
            if not any_rank(known, self.device):  # an ended run may be started again
                self.evaluate("test")
        self.save()
        self.saver.finish()
        self.end_trace()
        why = self.left_because or "all iterations done"
        self.report.summary(self.progress, self.timer, why)
        return "done" if self.left_because is None else "requeue"

    def iteration(self, total: int) -> None:
        """Train on one global batch, the next of `total` updates; log it where a log is due.

        Where its numbers go wrong, the run may stand at an earlier iteration afterwards.
        """
        training, progress = self.config.training, self.progress
        batch = global_batch_size_at(training, progress.consumed_samples)
        count = num_microbatches(batch, training.micro_batch_size, self.groups.data.size)
        coming = progress.iteration + 1
        logged = coming % self.config.logging.log_interval == 0 or coming == total
        self.heartbeat.at("waiting for data", iteration=coming)
        with self.timer.apart("trace"):
            self.profiler.begin(coming)
        self.measures.watch(logged=logged)
        with self.timer.waiting(), phase("data"):
            read = list(islice(self.train_batches, count))
        batches = [micro.to(self.device) for micro in read]
        taken = self._taken(batch, batches)
        self.engine.begin_step(count)
        self.heartbeat.at("forward-backward")
        losses, tokens = taken.run(batches, None)
        self.heartbeat.at("optimizer step")
        rate = self._rate(batch, progress.updates + 1, total)
        with phase("optimizer"):
            verdict = self.guard.step(taken, losses, tokens, lr=rate, progress=progress)
        outcome, loss, fault = verdict.outcome, verdict.loss, verdict.fault
        self._advance(batch, outcome)
        self.timer.step_done()
        self.heartbeat.at("logging")
        if logged and loss is None:
            loss = mean_over_tokens(losses, tokens, self.groups)
        if loss is not None:
            progress.nan += not math.isfinite(loss)
            fault = fault or self.guard.bad_loss_alone(taken, loss, tokens)
            if logged:
                self._log(outcome, batch, loss, self._rate(batch, progress.updates, total))
        if fault is not None:
            self._answer(fault)

    def _taken(self, batch: int, batches: list[MicroBatch]) -> Taken:
        """What the coming step is made of, should it have to be run again."""
        first = self.progress.next_sample
        return Taken(
            iteration=self.progress.iteration + 1,
            first_sample=first,
            end_sample=self.order.after(first, batch),
            batches=batches,
            losses_of=self._program("training", len(batches)).losses_of,
            random=self.streams.states(),
            loss_scale=self.engine.loss_scale,
            order=self.order,
            run=partial(self._run, "training"),
        )

    def _answer(self, fault: Fault) -> None:
        """Do what the config wants done about a step that went wrong."""
        self.report.fault(fault, self.progress)
        if fault.action == "stop":
            raise TrainingStopped(str(fault))
        if fault.action == "rewind":
            self._go_back(fault)

    def _go_back(self, fault: Fault) -> None:
        """Stand at the last checkpoint again, and behind the samples of the fault."""
        self.end_trace()
        self.heartbeat.at("loading")
        self.saver.finish()  # it may be what to go back to
        with self.timer.apart("load"):
            self.train_batches = iter(())  # ends the loader's workers
            back = self.rewinder.go_back(fault, self.progress, saved=self.saver.newest)
        self.progress, self.order, self.train_batches = (
            back.start.progress,
            back.order,
            back.batches,
        )
        self.saver.went_back()
        self.timer.drop_lap()
        self._logged_samples = self.progress.consumed_samples
        self.report.went_back(self.progress, back.start, fault, skipped=back.skipped)

    def end_trace(self) -> None:
        """Record no more, and write what was recorded; all ranks wait for those that do.

        The phase says that this may last. Waiting in a step for a rank that writes, a rank that is
        asked to leave would find that no step ends, and give up without a save; at the end of a run
        the launcher would end a rank that still writes with the first one that leaves.
        """
        if not self.profiler.is_within:
            return
        self.heartbeat.at("trace")
        with self.timer.apart("trace"):
            self.profiler.stop()
            self.profiler.write()
            dist.barrier()

    def check_replicas(self) -> None:
        """Compare what should be the same weights; TrainingStopped where they are not."""
        if lines := replica_faults(self.engine, self.groups.grid, self.device, node=self.node):
            checked = self.progress.iteration - self.config.training.check_replicas_interval
            raise TrainingStopped(
                f"iteration {self.progress.iteration}: replicas drifted, so that the run is no "
                f"longer one model. {'; '.join(lines)}. At iteration {max(checked, 0)} they "
                "were equal: go on from a checkpoint that is not newer, without a node that is "
                "named here"
            )

    def _advance(self, batch: int, outcome: StepOutcome) -> None:
        """Count the step of a global batch, and where in the data the run stands now."""
        progress, before = self.progress, self.progress.next_sample
        left_out = self.order.after(before, batch) - before - batch
        progress.advance(samples=batch, left_out=left_out, applied=outcome.applied)
        # A source that is not in the present blend keeps its place.
        progress.source_samples = progress.source_samples | self.order.taken(progress.next_sample)

    def _run(
        self,
        purpose: Literal["training", "evaluation"],
        batches: list[MicroBatch],
        compute: Compute | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Run a schedule, with other work behind its actions where that is given; returns the loss
        sums (on the last stage) and all replicas' tokens."""
        executor = self.executor if compute is None else self.executor.computing(compute)
        if compute is not None:
            self.heartbeat.at("replay")
        shape = hidden_shape(self.config, self.groups.tensor.size, batches)
        program = self._program(purpose, len(batches))
        tokens = self._count_tokens(batches)
        weight = None
        if not program.schedule.forward_only:
            # DeepSpeed divides by the size of the group when it averages.
            weight = self.engine.loss_scale * self.groups.gradient.size / tokens.clamp(min=1)
        losses = executor.run(program, batches, hidden_shape=shape, loss_gradient=weight)
        return losses, tokens

    def _count_tokens(self, batches: list[MicroBatch]) -> Tensor:
        """Unmasked tokens of all replicas; every rank reads the masks, so none has to ask."""
        own = torch.zeros((), device=self.device)
        for micro in batches:
            own += micro.loss_mask.sum()
        return all_reduce(own, self.groups.data)

    def _program(self, purpose: Literal["training", "evaluation"], count: int) -> Program:
        if (purpose, count) not in self._programs:
            tables = self.plan.training if purpose == "training" else self.plan.evaluation
            self._programs[purpose, count] = Program(tables(count), self.groups.pipeline.rank)
        return self._programs[purpose, count]

    def _rate(self, batch: int, update: int, total: int) -> float:
        optimizer = self.config.optimizer
        rate = learning_rate(optimizer, update=update, total_updates=total)
        return rate * batch_scaling_factor(optimizer, batch)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.progress.iteration % interval == 0

    def _log(self, outcome: StepOutcome, batch: int, loss: float, rate: float) -> None:
        consumed = self.progress.consumed_samples
        self.report.step(
            self.progress,
            outcome,
            lap=self.timer.lap(),
            lap_samples=consumed - self._logged_samples,
            batch=batch,
            loss=loss,
            learning_rate=rate,
            measured=self.measures.take(self.progress.iteration),
        )
        self._logged_samples = consumed

    def evaluate(self, part: Part) -> float | None:
        """Mean loss over the unmasked tokens of a part; leaves training bit for bit as it was.

        None, with nothing reported, where the run is asked to leave meanwhile.
        """
        started = self.timer.totals["evaluation"]
        self.heartbeat.at("evaluation", part)
        self.engine.train(False)
        total, tokens = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        with self.timer.apart("evaluation"):
            batches = self.evaluations[part]()
            # A few at a time: enough to fill the pipeline, few enough to hold in memory.
            few = 4 * self.groups.pipeline.size
            while some := [b.to(self.device) for b in islice(batches, few)]:
                losses, seen = self._run("evaluation", some)
                total, tokens = sum(losses, start=total), tokens + seen
                if self._must_leave():
                    break
            loss = mean_over_tokens([total], tokens, self.groups)
        self.engine.train(True)
        if part == "valid":
            self.progress.evaluation_due = self.left_because is not None
        if self.left_because is not None:
            return None
        seconds = self.timer.totals["evaluation"] - started
        self.report.evaluation(part, self.progress, loss=loss, seconds=seconds)
        return loss

    def save(self) -> None:
        """Save the current step."""
        self.heartbeat.at("save")
        self.saver.save(self.progress, self._snapshot)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            fragments=list(self.engine.fragments()),
            rng=self.streams.states(),
            progress=asdict(self.progress),
            scalars=self.engine.scalars(),
            grid=self.groups.grid,
            config=dict(self.resolved),
            origins=self.origins,
        )

    def _must_leave(self) -> bool:
        """Whether all ranks save and leave, since one was asked to or its time is up. Collective;
        after the first time the answer stays."""
        if self.left_because is not None:
            return True
        own = self.stop.poll()
        # Rank 0 tells why, and the others' steps took as long as its own.
        if own is None and self.groups.grid.rank == 0 and self.progress.iteration > self._began_at:
            own = self._out_of_time()
        if any_rank(own is not None, self.device):
            self.left_because = own or "another rank was asked to"
            self.stop.answered.set()
        return self.left_because is not None

    def _out_of_time(self) -> str | None:
        """Why this rank has no time for one more step, if so."""
        limit, save = self.config.training.exit_duration_in_mins, self.saver.longest
        if limit is not None and self.time_limit.minutes() > limit:
            return "exit_duration_in_mins is over"
        if save is not None and self.time_limit.is_near(step=self._step_seconds, save=save):
            return "the job's time is nearly over"
        return None
