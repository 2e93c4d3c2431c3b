"""Small training runs as functions for `on_ranks`: they return what tests compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite.build import build_trainer
from megatron_lite.build_model import Place, build_grid
from megatron_lite.config.load import load_config
from megatron_lite.engine.interface import Engine
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.trainer import Trainer


@dataclass
class Result:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    first_moments: dict[str, np.ndarray] = field(default_factory=dict)
    """exp_avg after the first step: (1 − β₁) × the clipped gradient, by logical tensor; this rank's
    part, NaN elsewhere."""
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """Master weights at the end, likewise."""


def make_trainer(
    config: Path,
    overrides: Sequence[str],
    run_dir: Path,
    groups: ProcessGroups | None = None,
) -> Trainer:
    """A trainer on the current process group; `groups` of an earlier one of the same layout."""
    world_size = dist.get_world_size()
    loaded = load_config(config, overrides, world_size)
    if groups is None:
        grid = build_grid(loaded.config, rank=dist.get_rank(), world_size=world_size)
        groups = ProcessGroups.create(grid)
    place = Place(groups, torch.device("cpu"), run_dir, node=f"n{dist.get_rank()}")
    return build_trainer(loaded.config, place)


def train(
    config: Path,
    overrides: Sequence[str],
    run_dir: Path,
    prepare: Callable[[Trainer], None] | None = None,
) -> Result:
    """Train to the end of the config; `prepare` may change the trainer first."""
    trainer = make_trainer(config, overrides, run_dir)
    result = Result()
    _listen(trainer, result)
    if prepare is not None:
        prepare(trainer)
    trainer.fit()
    result.weights = logical_state(trainer.engine, "fp32")
    trainer.train_batches = iter(())  # ends the loader's workers
    trainer.report.close()
    trainer.engine.close()
    return result


def _listen(trainer: Trainer, result: Result) -> None:
    step, report = trainer.engine.step, trainer.report.step

    def listening_step(lr: float) -> Any:
        outcome = step(lr)
        result.norms.append(outcome.grad_norm)
        result.scales.append(outcome.loss_scale)
        result.applied.append(outcome.applied)
        if not result.first_moments:
            result.first_moments = logical_state(trainer.engine, "exp_avg")
        return outcome

    def listening_report(*args: Any, **kwargs: Any) -> None:
        result.losses.append(kwargs["loss"])
        report(*args, **kwargs)

    trainer.engine.step = listening_step  # type: ignore[method-assign]
    trainer.report.step = listening_report  # type: ignore[method-assign]


def logical_state(engine: Engine, state: str) -> dict[str, np.ndarray]:
    """This rank's part of a state by logical tensor, NaN where others hold it."""
    whole: dict[str, np.ndarray] = {}
    for fragment in engine.fragments():
        for piece in fragment.pieces:
            if piece.tensor not in whole:
                whole[piece.tensor] = np.full(piece.shape, np.nan, dtype=np.float32)
            whole[piece.tensor][piece.box.slices()] = fragment.view(state, piece).numpy()
    return whole


def merged(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Put the ranks' parts together; every element must be there, copies must be equal."""
    whole: dict[str, np.ndarray] = {}
    for part in parts:
        for name, values in part.items():
            there = whole.setdefault(name, np.full_like(values, np.nan))
            both = ~np.isnan(there) & ~np.isnan(values)
            np.testing.assert_array_equal(there[both], values[both], err_msg=f"copies of {name}")
            np.copyto(there, values, where=~np.isnan(values))
    for name, values in whole.items():
        assert not np.isnan(values).any(), f"{name}: elements that no rank holds"
    return whole
