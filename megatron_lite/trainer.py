"""Trainer: when to step, log, evaluate, save and stop. What these are, others know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_lite.checkpoint.save import Snapshot
from megatron_lite.config.batch import global_batch_size_at, num_microbatches, train_iters
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.loader import MicroBatch
from megatron_lite.data.training_order import TrainingOrder
from megatron_lite.engine.interface import Engine, StepOutcome
from megatron_lite.engine.lr_schedule import batch_scaling_factor, learning_rate
from megatron_lite.health.stopping import StopRequest
from megatron_lite.monitoring.timers import StepTimer
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.mappings import all_reduce
from megatron_lite.mpu.random import RngStreams
from megatron_lite.mpu.reductions import any_rank, gather_texts, mean_over_tokens
from megatron_lite.pipeline.executor import PipelineExecutor, Program
from megatron_lite.pipeline.schedules import build_schedule, forward_only
from megatron_lite.progress import Progress
from megatron_lite.report import Reporter
from megatron_lite.saving import Saver

Part = Literal["valid", "test"]


class TrainingStopped(Exception):
    """The run can't go on; the message says why and what to look at."""


@dataclass
class Trainer:
    """One rank's loop. Everything it needs is handed in by build.py."""

    config: RunConfig
    resolved: Mapping[str, Any]
    """The config as plain JSON values, which a checkpoint keeps."""
    origins: Mapping[str, str]
    """Where each of them was written."""
    groups: ProcessGroups
    engine: Engine
    executor: PipelineExecutor
    streams: RngStreams
    order: TrainingOrder
    """Which samples those batches are."""
    train_batches: Iterator[MicroBatch]
    evaluations: Mapping[Part, Callable[[], Iterator[MicroBatch]]]
    """This rank's micro-batches of a part, anew at each call; every rank gets the same number."""
    report: Reporter
    progress: Progress
    saver: Saver
    timer: StepTimer
    device: torch.device
    stop: StopRequest
    left_because: str | None = None
    """Why training ended before its end."""
    _programs: dict[tuple[str, int], Program] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _began_at: int = 0
    _logged_samples: int = 0
    _incurable: int = 0
    """Skipped steps in a row that a lower loss scale can't cure."""

    def fit(self) -> Literal["done", "requeue"]:
        """Train to the end, or until asked to leave or out of time (then "requeue").

        TrainingStopped, on all ranks alike, where going on makes no sense.
        """
        try:
            return self._fit()
        except TrainingStopped:
            self.saver.finish()  # a save on its way is worth having
            raise

    def _fit(self) -> Literal["done", "requeue"]:
        self.saver.nothing_new(self.progress.iteration)
        self._began_at = self.progress.iteration
        self._logged_samples = self.progress.consumed_samples
        total = train_iters(self.config.training)
        if self.progress.evaluation_due and "valid" in self.evaluations:
            self.evaluate("valid")  # so that a curve has no gap where the run had left
        while self.progress.iteration < total and not self._must_leave():
            self.iteration(total)
            self.saver.finish_written()
            if self._due(self.config.training.eval_interval) and "valid" in self.evaluations:
                self.evaluate("valid")
            if self._due(self.config.checkpoint.save_interval):
                self.save()
        if self.progress.iteration == total and "test" in self.evaluations:
            self.evaluate("test")
        self.save()
        self.saver.finish()
        why = self.left_because or "all iterations done"
        self.report.summary(self.progress, self.timer, why)
        return "done" if self.left_because is None else "requeue"

    def iteration(self, total: int) -> None:
        """Train on one global batch, the next of `total` updates; log it where a log is due."""
        training, progress = self.config.training, self.progress
        batch = global_batch_size_at(training, progress.consumed_samples)
        count = num_microbatches(batch, training.micro_batch_size, self.groups.data.size)
        with self.timer.waiting():
            taken = list(islice(self.train_batches, count))
        batches = [micro.to(self.device) for micro in taken]
        incurable = self._incurable_now()
        self.engine.begin_step(count, diagnose=incurable and self._last_chance())
        losses, tokens = self._run(self.config.parallel.pipeline_schedule, batches)
        outcome = self.engine.step(self._rate(batch, progress.updates + 1, total))
        self._advance(batch, outcome)
        self.timer.step_done()
        logged = self._due(self.config.logging.log_interval) or progress.iteration == total
        if logged or not outcome.applied:
            loss = mean_over_tokens(losses, tokens, self.groups)
            progress.nan += not math.isfinite(loss)
        if logged:
            self._log(outcome, batch, loss, self._rate(batch, progress.updates, total))
        self._stop_if_incurable(outcome, incurable)

    def _advance(self, batch: int, outcome: StepOutcome) -> None:
        """Count the step of a global batch, and where in the data the run stands now."""
        progress, before = self.progress, self.progress.next_sample
        left_out = self.order.after(before, batch) - before - batch
        progress.advance(samples=batch, left_out=left_out, applied=outcome.applied)
        # A source that is not in the present blend keeps its place.
        progress.source_samples = progress.source_samples | self.order.taken(progress.next_sample)

    def _run(self, schedule: str, batches: list[MicroBatch]) -> tuple[list[Tensor], Tensor]:
        """Run a schedule; returns the loss sums (on the last stage) and all replicas' tokens."""
        shape = self._hidden_shape(batches)
        program = self._program(schedule, len(batches))
        tokens = self._count_tokens(batches)
        weight = None
        if not program.schedule.forward_only:
            # DeepSpeed divides by the data-parallel size when it averages.
            weight = self.engine.loss_scale * self.groups.data.size / tokens.clamp(min=1)
        losses = self.executor.run(program, batches, hidden_shape=shape, loss_gradient=weight)
        return losses, tokens

    def _hidden_shape(self, batches: list[MicroBatch]) -> tuple[int, int]:
        """Shape of what stages exchange; ValueError where the stages could not run the batches."""
        model, parallel = self.config.model, self.config.parallel
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if len(shapes) > 1:
            raise ValueError(f"micro-batches that run together differ in shape: {sorted(shapes)}")
        rows, length = shapes.pop()
        learned = model.position_embedding_type == "learned_absolute"
        if learned and length > model.max_position_embeddings:
            raise ValueError(
                f"sequences of {length} tokens, but model.max_position_embeddings is "
                f"{model.max_position_embeddings}"
            )
        if not parallel.sequence_parallel:
            return rows * length, model.hidden_size
        tokens, rest = divmod(rows * length, self.groups.tensor.size)
        if rest:
            raise ValueError(
                f"micro-batches of {rows} x {length} tokens can't be cut over "
                f"{self.groups.tensor.size} tensor-parallel ranks, as sequence_parallel asks"
            )
        return tokens, model.hidden_size

    def _count_tokens(self, batches: list[MicroBatch]) -> Tensor:
        """Unmasked tokens of all replicas; every rank reads the masks, so none has to ask."""
        own = torch.zeros((), device=self.device)
        for micro in batches:
            own += micro.loss_mask.sum()
        return all_reduce(own, self.groups.data)

    def _program(self, name: str, count: int) -> Program:
        if (name, count) not in self._programs:
            stages, rank = self.groups.pipeline.size, self.groups.pipeline.rank
            if name == "forward-only":
                schedule = forward_only(stages, count)
            else:
                schedule = build_schedule(name, num_stages=stages, num_microbatches=count)
            self._programs[name, count] = Program(schedule, rank)
        return self._programs[name, count]

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
        )
        self._logged_samples = consumed

    def evaluate(self, part: Part) -> float | None:
        """Mean loss over the unmasked tokens of a part; leaves training bit for bit as it was.

        None, with nothing reported, where the run is asked to leave meanwhile.
        """
        started = self.timer.totals["evaluation"]
        self.engine.train(False)
        total, tokens = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        with self.timer.apart("evaluation"):
            batches = self.evaluations[part]()
            # A few at a time: enough to fill the pipeline, few enough to hold in memory.
            while some := [b.to(self.device) for b in islice(batches, 4 * self._stages)]:
                losses, seen = self._run("forward-only", some)
                total, tokens = sum(losses, start=total), tokens + seen
                if self._must_leave():
                    break
            last = self.groups.pipeline.rank == self._stages - 1
            loss = mean_over_tokens([total] if last else [], tokens, self.groups)
        self.engine.train(True)
        if part == "valid":
            self.progress.evaluation_due = self.left_because is not None
        if self.left_because is not None:
            return None
        seconds = self.timer.totals["evaluation"] - started
        self.report.evaluation(part, self.progress, loss=loss, seconds=seconds)
        return loss

    @property
    def _stages(self) -> int:
        return self.groups.pipeline.size

    def save(self) -> None:
        """Save the current step."""
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
        own, limit = self.stop.poll(), self.config.training.exit_duration_in_mins
        in_time = limit is None or time.monotonic() - self._started <= 60 * limit
        if own is None and not in_time and self.progress.iteration > self._began_at:
            own = "exit_duration_in_mins is over"
        if any_rank(own is not None, self.device):
            self.left_because = own or "another rank was asked to"
        return self.left_because is not None

    @property
    def _adapts(self) -> bool:
        precision = self.config.precision
        return precision.dtype == "fp16" and precision.loss_scale == "dynamic"

    def _incurable_now(self) -> bool:
        """True where a skip of the coming step is none that a lower loss scale can cure."""
        return not self._adapts or self.engine.loss_scale <= self.config.precision.min_loss_scale

    def _last_chance(self) -> bool:
        """True where one more such skip ends the run, so that its cause is looked for."""
        return self._incurable + 1 >= self.config.precision.max_consecutive_nonfinite_steps

    def _stop_if_incurable(self, outcome: StepOutcome, incurable: bool) -> None:
        """Count skipped steps that a lower loss scale can't cure; end the run after too many."""
        if outcome.applied or not incurable:
            self._incurable = 0
            return
        ends = self._last_chance()
        self._incurable += 1
        if not ends:
            return
        found = gather_texts(self.engine.nonfinite_parameter())
        where = "; ".join(
            f"rank {rank} (stage {self.groups.grid.at(rank).pp_rank}): {name}"
            for rank, name in found.items()
        )
        raise TrainingStopped(
            f"iteration {self.progress.iteration}: gradients were not finite in {self._incurable} "
            f"steps in a row at loss scale {outcome.loss_scale:g}"
            f"{', the smallest allowed' if self._adapts else ''}. First bad parameter of each "
            f"rank: {where or 'none before the ranks were averaged'}. Lower optimizer.lr, look at "
            "the data of these iterations, or train in bf16"
        )
