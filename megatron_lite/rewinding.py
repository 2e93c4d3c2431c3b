"""Rewinder: a run goes back to a checkpoint of its own and on past the samples that harmed it.

What results is, bit for bit, a run started from that checkpoint with data.skip_samples set to the
range, which the run's position keeps from then on. Called by the trainer on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import RunConfig
from megatron_lite.data.blended import BlendedDataset
from megatron_lite.data.loader import MicroBatch
from megatron_lite.data.sampler import joined
from megatron_lite.data.training_order import TrainingOrder
from megatron_lite.engine.interface import Engine
from megatron_lite.guard import Fault, TrainingStopped
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.random import RngStreams
from megatron_lite.progress import Progress
from megatron_lite.resume import Start, restore


@dataclass(frozen=True)
class WentBack:
    """Where the run stands after a rewind, and what it leaves out."""

    start: Start
    order: TrainingOrder
    batches: Iterator[MicroBatch]
    skipped: tuple[int, int]
    """[first, last) of the samples that are left out for this fault."""


@dataclass
class Rewinder:
    """What going back needs; it is made once, and remembers where it went."""

    config: RunConfig
    resolved: Mapping[str, Any]
    grid: Grid
    engine: Engine
    streams: RngStreams
    dataset: BlendedDataset
    """The training part, from its beginning."""
    batches: Callable[[TrainingOrder, Progress], Iterator[MicroBatch]]
    """The micro-batches from a position on."""
    save_root: Path | None
    load_root: Path | None
    loaded: int | None
    """Iteration of the checkpoint that this start of the run goes on from, with all its states."""
    _last: int = -1
    """The iteration that the run went back to."""
    _times: int = 0
    """How often in a row."""

    def go_back(self, fault: Fault, progress: Progress, *, saved: int | None) -> WentBack:
        """Load the newest checkpoint of this run: of iteration `saved`, or what it started from.

        `progress` is where the run stands, behind the fault. TrainingStopped on all ranks where
        there is no checkpoint, and after training.max_rewinds to the same one; CheckpointError
        where it can't be loaded.
        """
        config, root, step = self._target(saved)
        if root is None or step is None:
            raise TrainingStopped(
                f"{fault}. There is no checkpoint of this run yet to go back to (training.on_nan "
                "or loss_spike: rewind); lower checkpoint.save_interval"
            )
        self._times = self._times + 1 if step == self._last else 1
        self._last, limit = step, self.config.training.max_rewinds
        if self._times > limit:
            raise TrainingStopped(
                f"{fault}. The run has gone back to iteration {step} {limit} times already "
                "(training.max_rewinds) and has not come to its next checkpoint: it is not these "
                "batches. Lower optimizer.lr, or go on from an older one (checkpoint.ckpt_step)"
            )
        start = restore(
            config,
            self.resolved,
            root=root,
            grid=self.grid,
            engine=self.engine,
            streams=self.streams,
        )
        skipped = self._skip(start.progress, fault, before=progress)
        order = TrainingOrder.of(self.dataset, start.progress, self.config.data.skip_samples)
        return WentBack(start, order, self.batches(order, start.progress), skipped)

    def _target(self, saved: int | None) -> tuple[RunConfig, Path | None, int | None]:
        """Config to load by, folder, iteration."""
        step = self.loaded if saved is None else saved
        changes: dict[str, Any] = {"ckpt_step": step}
        if saved is not None:
            # What this start wrote is its own: nothing of how it began applies.
            changes |= {"no_load_optim": False, "no_load_rng": False, "finetune": False}
            changes |= {"strict": True, "exit_on_missing_checkpoint": True}
        checkpoint = self.config.checkpoint.model_copy(update=changes)
        root = self.load_root if saved is None else self.save_root
        return self.config.model_copy(update={"checkpoint": checkpoint}), root, step

    def _skip(self, progress: Progress, fault: Fault, *, before: Progress) -> tuple[int, int]:
        """Leave samples out of the position that the run goes on from; returns the range."""
        training = self.config.training
        first, (begin, end) = progress.next_sample, fault.samples
        if training.rewind_batches is not None:
            first = max(first, end - training.rewind_batches * (end - begin))
        known = [(low, high) for low, high in before.skip_samples]
        progress.skip_samples = [list(pair) for pair in joined([*known, (first, end)])]
        progress.rewinds = before.rewinds + 1
        return first, end
