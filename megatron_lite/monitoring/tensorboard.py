"""Writes a run's curves, texts and histograms for TensorBoard.

Needs the package tensorboard. Called by the reporter, on the one process that reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_lite.monitoring.histograms import Histogram
from megatron_lite.monitoring.scalars import VS_SAMPLES, Position, Scalar


class Point(NamedTuple):
    """One scalar of a tag that an event file holds."""

    wall_time: float
    step: int
    value: float


class TensorBoardWriter:
    """Appends to the event files of `directory`; x never goes back within a tag.

    `start` is where this start of the run begins. Points beyond it, left by an earlier start that
    had got further than the checkpoint now loaded, are marked as superseded, so that a resumed
    curve has no loop. Raises ModuleNotFoundError, saying what to do, when the package tensorboard
    is missing.
    """

    def __init__(self, directory: Path, *, start: Position) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "logging.tensorboard_dir is set but the package tensorboard is not installed:"
                " install it, or set logging.tensorboard_dir to null",
                name=error.name,
            ) from error
        points = _existing_points(directory)
        first_new = start.iteration + 1 if start.iteration > 0 else 0
        superseded = any(
            point.step > start.last_valid(tag)
            for tag, tag_points in points.items()
            for point in tag_points
        )
        self._last_step: dict[str, int] = {}
        self._start = start
        self._writer = SummaryWriter(str(directory), purge_step=first_new if superseded else None)
        if superseded:
            self._rewrite_samples(points, first_purged=first_new, last_kept=start.consumed_samples)
        self._writer.flush()

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Appends points; ValueError where one lies before the last one of its tag."""
        for tag, value, step in scalars:
            last = self._last_step.get(tag, step)
            if step < last:
                raise ValueError(f"TensorBoard tag {tag!r}: step {step} comes after step {last}")
            self._last_step[tag] = step
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def texts(self, texts: Mapping[str, str]) -> None:
        """Writes Markdown texts by tag, at the iteration where this start of the run begins."""
        for tag, text in texts.items():
            self._writer.add_text(tag, text, self._start.iteration)
        self._writer.flush()

    def histograms(self, histograms: Mapping[str, Histogram], iteration: int) -> None:
        """Writes the histogram of each tag."""
        for tag, histogram in histograms.items():
            self._writer.add_histogram_raw(tag, **histogram.raw(), global_step=iteration)
        self._writer.flush()

    def close(self) -> None:
        """Writes what is pending and closes the file."""
        self._writer.close()

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
