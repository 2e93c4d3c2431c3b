"""Writes a run's scalars for TensorBoard under Megatron's tags.

x is the iteration; tags that end in " vs samples" have consumed samples instead. Needs the package
tensorboard. Called by the trainer, on the one process that reports.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatron_lite.monitoring.metrics import EvaluationMetrics, StepMetrics, perplexity

VS_SAMPLES = " vs samples"


class Point(NamedTuple):
    """One scalar of a tag that an event file holds."""

    wall_time: float
    step: int
    value: float


class TensorBoardWriter:
    """Appends scalars to the event files of `directory`; x never goes back within a tag.

    `iteration` and `consumed_samples` are where this start of the run begins. Points beyond it,
    left by an earlier start that had got further than the checkpoint now loaded, are marked as
    superseded, so that a resumed curve has no loop. Raises ModuleNotFoundError, saying what to do,
    when the package tensorboard is missing.
    """

    def __init__(self, directory: Path, *, iteration: int, consumed_samples: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "logging.tensorboard_dir is set but the package tensorboard is not installed:"
                " install it, or set logging.tensorboard_dir to null",
                name=error.name,
            ) from error
        points = _existing_points(directory)
        first_new = iteration + 1 if iteration > 0 else 0
        superseded = any(
            point.step > (consumed_samples if tag.endswith(VS_SAMPLES) else first_new - 1)
            for tag, tag_points in points.items()
            for point in tag_points
        )
        self._last_step: dict[str, int] = {}
        self._writer = SummaryWriter(str(directory), purge_step=first_new if superseded else None)
        if superseded:
            self._rewrite_samples(points, first_purged=first_new, last_kept=consumed_samples)
        self._writer.flush()

    def train(
        self,
        row: StepMetrics,
        *,
        world_size: int,
        mem_max_allocated_bytes: int,
        params_norm: float | None = None,
        num_zeros: int | None = None,
    ) -> None:
        """Writes one log step; what is None has no point. Memory is the maximum over ranks."""
        both_axes = {
            "lm loss": row.lm_loss,
            "learning-rate": row.learning_rate,
            "batch-size": row.global_batch_size,
            "loss-scale": row.loss_scale,
            "grad-norm": row.grad_norm,
            "params-norm": params_norm,
            "num-zeros": num_zeros,
            "world-size": world_size,
        }
        by_iteration = {
            "iteration-time": row.elapsed_ms_per_iteration / 1000,
            "batch-generator-time": row.data_wait_ms_per_iteration / 1000,  # Megatron's name for it
            "throughput": row.tflops_per_gpu,
            "tokens-per-second": row.tokens_per_second,
            "mfu": row.mfu,
            "skipped-iterations": row.skipped_iterations,
            "nan-iterations": row.nan_iterations,
            "mem-max-allocated-bytes": mem_max_allocated_bytes,
            "slowest-rank": row.slowest_rank,
            "slowest-rank-share": row.slowest_rank_share,
            "slowest-rank-ratio": row.slowest_rank_ratio,
        }
        for tag, value in both_axes.items():
            self._add_on_both_axes(tag, value, row)
        for tag, value in by_iteration.items():
            self._add(tag, value, row.iteration)
        self._writer.flush()

    def evaluation(self, row: EvaluationMetrics) -> None:
        """Writes one validation or test, each under its own tags, with capped perplexity."""
        tag = {"valid": "lm loss validation", "test": "lm loss test"}[row.event]
        self._add_on_both_axes(tag, row.lm_loss, row)
        self._add_on_both_axes(f"{tag} ppl", perplexity(row.lm_loss), row)
        self._writer.flush()

    def close(self) -> None:
        """Writes what is pending and closes the file."""
        self._writer.close()

    def _add_on_both_axes(
        self, tag: str, value: float | None, row: StepMetrics | EvaluationMetrics
    ) -> None:
        self._add(tag, value, row.iteration)
        self._add(tag + VS_SAMPLES, value, row.consumed_samples)

    def _add(self, tag: str, value: float | None, step: int) -> None:
        if value is None:
            return
        last = self._last_step.get(tag, step)
        if step < last:
            raise ValueError(f"TensorBoard tag {tag!r}: step {step} comes after step {last}")
        self._last_step[tag] = step
        self._writer.add_scalar(tag, value, step)

    def _rewrite_samples(
        self, points: dict[str, list[Point]], *, first_purged: int, last_kept: int
    ) -> None:
        """Writes valid " vs samples" points again, with their old times.

        TensorBoard's mark drops everything from one x on, whatever a tag's unit is; samples are
        more than iterations, so it would drop nearly all of them.
        """
        for tag, tag_points in points.items():
            if not tag.endswith(VS_SAMPLES):
                continue
            for point in tag_points:
                if first_purged <= point.step <= last_kept:
                    self._writer.add_scalar(tag, point.value, point.step, walltime=point.wall_time)


def _existing_points(directory: Path) -> dict[str, list[Point]]:
    """All scalars that earlier starts of this run left, by tag."""
    if not any(directory.glob("events.out.tfevents.*")):
        return {}
    from tensorboard.backend.event_processing import (
        event_accumulator,
    )

    keep_all = {event_accumulator.SCALARS: 0}
    reader = event_accumulator.EventAccumulator(str(directory), size_guidance=keep_all)
    reader.Reload()
    return {
        tag: [Point(event.wall_time, event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()[event_accumulator.SCALARS]
    }
