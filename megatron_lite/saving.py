"""Saver: when a run's checkpoints are written, at once or while training goes on.

The trainer asks for saves; what a checkpoint is, checkpoint/ knows. At most one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.save import Save, Snapshot
from megatron_lite.config.schema import CheckpointConfig
from megatron_lite.monitoring.timers import StepTimer
from megatron_lite.mpu.reductions import any_rank
from megatron_lite.progress import Progress
from megatron_lite.report import Reporter


def in_the_way(root: Path | None, progress: Progress) -> list[str]:
    """A line on checkpoints beyond where a run starts, which its own will replace."""
    steps = [] if root is None else [s for s in store.steps(root) if s > progress.iteration]
    if not steps:
        return []
    return [
        f" WARNING: {root} has checkpoints of an earlier start, up to iteration {steps[-1]}. This "
        f"one starts at {progress.iteration} and replaces them as it gets there. To keep them, end "
        "it and choose another --run-dir; to go on from the newest, set checkpoint.load |"
    ]


@dataclass
class _OnItsWay:
    save: Save
    progress: Progress
    started: float
    waited: float
    """Seconds that training has stood still for it."""
    thread: Thread | None = None


class Saver:
    """One rank's part in all saves of a run; every method is called by all ranks together."""

    def __init__(
        self,
        config: CheckpointConfig,
        root: Path | None,
        *,
        timer: StepTimer,
        report: Reporter,
        device: torch.device,
    ) -> None:
        self._config, self.root = config, root
        self._timer, self._report, self._device = timer, report, device
        self._saved_at: int | None = None
        self.newest: int | None = None
        """Iteration of the newest checkpoint that this start of the run has committed."""
        self.longest: float | None = None
        """Seconds that the slowest of its saves took; None: there was none."""
        self._on_its_way: _OnItsWay | None = None

    def nothing_new(self, step: int) -> None:
        """What training starts from needs no save."""
        self._saved_at = step

    def went_back(self) -> None:
        """Training stands at a saved step again, but not in its place of the data: that is new."""
        self._saved_at = None

    def save(self, progress: Progress, snapshot: Callable[[], Snapshot]) -> None:
        """Save unless this step is saved; an earlier save on its way is awaited first."""
        if self.root is None or self._saved_at == progress.iteration:
            return
        self.finish()
        started = self._timer.clock()
        with self._timer.apart("save"):
            taken = snapshot().copied() if self._config.async_save else snapshot()
            save = Save(self.root, taken, keep_last=self._config.keep_last)
            current = _OnItsWay(save, replace(progress), started, 0.0)
            if self._config.async_save:
                current.thread = Thread(target=save.write, name="save", daemon=True)
                current.thread.start()
            else:
                save.write()
        current.waited = self._timer.clock() - started
        self._saved_at, self._on_its_way = progress.iteration, current
        if current.thread is None:
            self.finish()

    def finish_written(self) -> None:
        """Commit the save on its way if all ranks have written it."""
        current = self._on_its_way
        if current is None or current.thread is None:
            return
        if not any_rank(current.thread.is_alive(), self._device):
            self.finish()

    def finish(self) -> None:
        """Wait for the save on its way and commit it; CheckpointError on all ranks if it failed."""
        current = self._on_its_way
        if current is None:
            return
        started = self._timer.clock()
        with self._timer.apart("save"):
            if current.thread is not None:
                current.thread.join()
            self._on_its_way = None
            saved = current.save.finish()
        self.newest = current.progress.iteration
        now = self._timer.clock()
        seconds = now - current.started
        self.longest = max(seconds, self.longest or 0.0)
        self._report.saved(
            saved,
            current.progress,
            seconds=seconds,
            waited=current.waited + now - started,
        )
