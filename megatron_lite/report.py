"""Reporter: one run's console lines, metrics.jsonl and curves, written by rank 0.

It turns what happened into rows; it decides nothing about training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_lite.boards import Boards
from megatron_lite.checkpoint.save import Saved
from megatron_lite.config.batch import train_iters
from megatron_lite.config.load import resolved_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.engine.interface import StepOutcome
from megatron_lite.engine.measures import Measured
from megatron_lite.guard import Fault
from megatron_lite.monitoring.console import (
    checkpoint_line,
    evaluation_line,
    memory_line,
    outcome_line,
    sources_line,
    straggler_line,
    summary_line,
    train_line,
)
from megatron_lite.monitoring.memory import peak_memory_bytes
from megatron_lite.monitoring.metrics import (
    CheckpointMetrics,
    EvaluationMetrics,
    FaultMetrics,
    MetricsWriter,
    RewindMetrics,
    StepMetrics,
)
from megatron_lite.monitoring.scalars import Position, at, of_evaluation, of_stages, of_step
from megatron_lite.monitoring.stragglers import slowest
from megatron_lite.monitoring.throughput import (
    model_flops_per_token,
    model_flops_utilization,
    peak_tflops,
    tflops_per_gpu,
    tokens_per_second,
)
from megatron_lite.monitoring.timers import Lap, StepTimer
from megatron_lite.mpu.reductions import largest
from megatron_lite.progress import Progress
from megatron_lite.resume import Start
from megatron_lite.stage_report import StageReport


def _print(line: str) -> None:
    print(line, flush=True)  # a launcher's pipe would hold it back


@dataclass(frozen=True)
class Speed:
    """What turns seconds into tokens and FLOPs."""

    seq_length: int
    flops_per_token: int
    world_size: int
    peak_tflops: float | None

    @classmethod
    def of(cls, config: RunConfig, *, vocab_size: int, world_size: int, device: str) -> Speed:
        """For a config on ranks of a device, by torch's name for it."""
        dtype = config.precision.dtype
        matrices = "tf32" if dtype == "fp32" and config.precision.tf32 else dtype
        return cls(
            seq_length=config.model.seq_length,
            flops_per_token=model_flops_per_token(config.model, vocab_size=vocab_size),
            world_size=world_size,
            peak_tflops=peak_tflops(device, matrices),
        )


class Reporter:
    """All ranks call it, since memory is compared over ranks; rank 0 writes."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_dir: Path,
        progress: Progress,
        speed: Speed,
        stages: StageReport,
        rank: int,
        device: torch.device,
        echo: Callable[[str], None] = _print,
    ) -> None:
        self._config, self._speed, self._device = config, speed, device
        self._stages = stages
        self._total = train_iters(config.training)
        self._echo = echo if rank == 0 else _silent
        self._seen = (progress.skipped, progress.nan)
        self._losses: list[float] = []
        self._tokens, self._peak, self._waited = 0, 0, 0.0
        self._loss_scale = 1.0
        self._told_slow: int | None = None
        self._metrics: MetricsWriter | None = None
        self._boards: Boards | None = None
        self._run_dir, self._writes = run_dir, rank == 0
        self._open(progress)

    def rewind(self, progress: Progress) -> None:
        """Training goes back to an earlier step: set aside what was reported beyond it."""
        self.close()
        self._seen = (progress.skipped, progress.nan)
        self._open(progress)

    def _open(self, progress: Progress) -> None:
        """Open all files, and tell what of an earlier start is set aside."""
        if not self._writes:
            return
        start = Position(progress.iteration, progress.consumed_samples)
        path = self._run_dir / "metrics.jsonl"
        self._metrics = MetricsWriter(path, last_iteration=start.iteration)
        if self._metrics.superseded:
            self._echo(
                f" {self._metrics.superseded} rows of {path} lie beyond iteration "
                f"{start.iteration}, from where the run goes on: moved to {self._metrics.other} |"
            )
        config = resolved_dict(self._config)
        self._boards = Boards(self._config.logging, self._run_dir, start=start, config=config)
        if self._boards.tensorboard_dir is not None:
            self._echo(f" curves: tensorboard --logdir {self._boards.tensorboard_dir} |")

    def say(self, line: str) -> None:
        """Print a line, once for the whole run."""
        self._echo(line)

    def step(
        self,
        progress: Progress,
        outcome: StepOutcome,
        *,
        lap: Lap,
        lap_samples: int,
        batch: int,
        loss: float,
        learning_rate: float,
        measured: Measured,
    ) -> None:
        """One log step: `lap_samples` samples since the last one, `batch` samples in this step."""
        speed = self._speed
        rate = tokens_per_second(
            samples=lap_samples, seq_length=speed.seq_length, seconds=lap.seconds
        )
        tflops = tflops_per_gpu(
            tokens_per_second=rate,
            flops_per_token=speed.flops_per_token,
            world_size=speed.world_size,
        )
        microseconds, _ = largest(round(1e6 * lap.waited), self._device)
        self._waited += microseconds / 1e6
        times = self._stages.gather(lap.worked, iterations=lap.iterations, batch=batch)
        slow = slowest(times.worked, lap.seconds_per_iteration)
        row = StepMetrics(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            elapsed_ms_per_iteration=1000 * lap.seconds_per_iteration,
            data_wait_ms_per_iteration=microseconds / 1000 / lap.iterations,
            tokens_per_second=rate,
            tflops_per_gpu=tflops,
            mfu=model_flops_utilization(tflops, speed.peak_tflops),
            learning_rate=learning_rate,
            global_batch_size=batch,
            lm_loss=loss,
            loss_scale=outcome.loss_scale,
            grad_norm=outcome.grad_norm,
            skipped_iterations=progress.skipped - self._seen[0],
            nan_iterations=progress.nan - self._seen[1],
            source_samples=progress.source_samples,
            slowest_rank=slow.rank,
            slowest_rank_share=slow.share,
            slowest_rank_ratio=slow.ratio,
            bubble=times.bubble,
            simulated_bubble=times.simulated_bubble,
            stage_forward_ms=[1000 * t.forward for t in times.stages.values()],
            stage_backward_ms=[1000 * t.backward for t in times.stages.values()],
            stage_idle_ms=[1000 * t.idle for t in times.stages.values()],
        )
        self._seen = (progress.skipped, progress.nan)
        self._losses.append(loss)
        self._tokens += lap_samples * speed.seq_length
        self._loss_scale = outcome.loss_scale
        kind: Literal["cuda", "cpu"] = "cuda" if self._device.type == "cuda" else "cpu"
        peak, peak_rank = largest(peak_memory_bytes(kind), self._device)
        self._echo(train_line(row, train_iters=self._total))
        if len(row.source_samples) > 1:
            self._echo(sources_line(row))
        if slow.worth_telling and slow.rank != self._told_slow:  # once, not at every step
            self._told_slow = slow.rank
            self._echo(straggler_line(row))
        if not self._peak:  # once is enough: the summary has the peak of the whole run
            self._echo(
                memory_line(
                    iteration=progress.iteration, peak_bytes=peak, rank=peak_rank, device=kind
                )
            )
        self._peak = max(self._peak, peak)
        if self._metrics is not None:
            self._metrics.write(row)
        if self._boards is not None:
            self._boards.write(
                of_step(
                    row,
                    world_size=speed.world_size,
                    mem_max_allocated_bytes=peak,
                    params_norm=measured.params_norm,
                    num_zeros=measured.num_zeros,
                )
            )
            self._boards.write(at(progress.iteration, of_stages(times.stages)))
            self._boards.histograms(measured.histograms, progress.iteration)

    def texts(self, texts: Mapping[str, str]) -> None:
        """Markdown by tag, for TensorBoard."""
        if self._boards is not None:
            self._boards.texts(texts)

    def evaluation(
        self, part: Literal["valid", "test"], progress: Progress, *, loss: float, seconds: float
    ) -> None:
        """One evaluation of a part."""
        row = EvaluationMetrics(
            event=part,
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            lm_loss=loss,
            elapsed_ms=1000 * seconds,
        )
        self._echo(evaluation_line(row))
        if self._metrics is not None:
            self._metrics.write(row)
        if self._boards is not None:
            self._boards.write(of_evaluation(row))

    def holds(self, part: Literal["valid", "test"], progress: Progress) -> bool:
        """Whether an earlier start has reported that evaluation; rank 0 knows."""
        return self._metrics is not None and self._metrics.holds(part, progress.iteration)

    def saved(self, saved: Saved, progress: Progress, *, seconds: float, waited: float) -> None:
        """One checkpoint written; training waited for it `waited` seconds."""
        for line in saved.differing:
            self._echo(f" WARNING: replicas drifted: {line} |")
        self.checkpoint("save", progress, seconds=seconds, size=saved.bytes, waited=waited)

    def checkpoint(
        self,
        event: Literal["save", "load"],
        progress: Progress,
        *,
        seconds: float,
        size: int,
        waited: float | None = None,
    ) -> None:
        """One checkpoint of `size` bytes written or read; null `waited`: the whole time."""
        row = CheckpointMetrics(
            event=event,
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            elapsed_ms=1000 * seconds,
            waited_ms=1000 * (seconds if waited is None else waited),
            bytes=size,
            gb_per_second=size / seconds / 1e9,
        )
        self._echo(checkpoint_line(row))
        if self._metrics is not None:
            self._metrics.write(row)

    def fault(self, fault: Fault, progress: Progress) -> None:
        """One step whose numbers went wrong."""
        self._echo(f" WARNING: {fault} | {fault.action} |")
        if self._metrics is not None:
            row = FaultMetrics(
                event=fault.event,
                iteration=fault.iteration,
                consumed_samples=progress.consumed_samples,
                action=fault.action,
                samples=fault.samples,
                story=fault.story,
                file=fault.file,
            )
            self._metrics.write(row)

    def went_back(
        self, progress: Progress, start: Start, fault: Fault, *, skipped: tuple[int, int]
    ) -> None:
        """The run stands at an earlier iteration again, from which curves go on."""
        for line in start.lines:
            self._echo(line)
        self._echo(
            f" went back from iteration {fault.iteration} to {progress.iteration} | leaving out "
            f"samples {skipped[0]} to {skipped[1] - 1} | rewinds of this run: {progress.rewinds} |"
        )
        self.rewind(progress)
        if self._metrics is not None:
            row = RewindMetrics(
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                from_iteration=fault.iteration,
                skip_samples=skipped,
                rewinds=progress.rewinds,
                because=f"{fault.event}: {fault.story}",
                file=fault.file,
            )
            self._metrics.write(row)

    def summary(self, progress: Progress, timer: StepTimer, reason: str) -> None:
        """The last words of this start of the run."""
        seconds = timer.totals
        self._echo(
            summary_line(
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                train_seconds=seconds["train"],
                evaluation_seconds=seconds["evaluation"],
                save_seconds=seconds["save"],
                skipped_iterations=progress.skipped,
                waiting_seconds=self._waited,
                reason=reason,
            )
        )
        if self._losses:
            self._echo(
                outcome_line(
                    first_loss=self._losses[0],
                    last_loss=self._losses[-1],
                    tokens_per_second=self._tokens / seconds["train"],
                    peak_bytes=self._peak,
                    loss_scale=self._loss_scale,
                )
            )

    def close(self) -> None:
        """Close the files."""
        for writer in (self._metrics, self._boards):
            if writer is not None:
                writer.close()


def _silent(line: str) -> None:
    """Ranks other than 0 print nothing."""
