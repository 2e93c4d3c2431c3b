"""Bad gradients on purpose, and a record of what every step moved."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite.checkpoint.manifest import STATES
from megatron_lite.engine.interface import Engine
from megatron_lite.guard import TrainingStopped
from megatron_lite.layers.deferred import Deferred
from megatron_lite.models.gpt import GPTStage
from megatron_lite.trainer import Trainer
from tests.distributed.runs import Result, logical_state, make_trainer

FOREVER = range(1, 10_000)


@dataclass
class Watched(Result):
    """A run whose steps were looked at one by one."""

    moved: list[bool] = field(default_factory=list)
    """Whether anything changed: working weights, masters, a moment or the count of updates."""
    rates: list[float] = field(default_factory=list)
    """The learning rate that each step was given."""
    updates: int = 0
    consumed: int = 0
    iterations: int = 0
    error: str = ""
    """What stopped the run; empty where it came to its end."""


def poison(
    trainer: Trainer,
    *,
    steps: Collection[int],
    ranks: Collection[int] = (0,),
    parameter: str = "mlp.down.weight",
) -> None:
    """Write an infinity into one gradient of `ranks` at iterations `steps`, counted from 1; it is
    that of a `parameter` of their first layer, also where a split backward puts it off."""
    if dist.get_rank() not in ranks:
        return
    stage = next(iter(trainer.engine.modules().values()))
    assert isinstance(stage, GPTStage)
    chosen = stage.layers[0].get_parameter(parameter)

    def spoil(grad: torch.Tensor | None) -> torch.Tensor | None:
        # Of a gradient that is put off the hook is called, too, with none.
        if grad is None or trainer.progress.iteration + 1 not in steps:
            return grad
        grad = grad.clone()
        grad.view(-1)[3] = float("inf")
        return grad

    chosen.register_hook(spoil)
    second_half = trainer.engine.backward_weight

    def spoilt(half: Deferred) -> Deferred:
        return (
            Deferred(half.weight, lambda: spoil(half.compute())) if half.weight is chosen else half
        )

    trainer.engine.backward_weight = lambda waiting: second_half(map(spoilt, waiting))  # type: ignore[method-assign]


def train_poisoned(
    config: Path,
    overrides: Sequence[str],
    run_dir: Path,
    steps: Collection[int],
    ranks: Collection[int] = (0,),
    parameter: str = "mlp.down.weight",
) -> Watched:
    """Train with bad gradients; a run that gives up is a result, too."""
    trainer = make_trainer(config, overrides, run_dir)
    seen = Watched()
    poison(trainer, steps=steps, ranks=ranks, parameter=parameter)
    _watch(trainer, seen)
    try:
        trainer.fit()
    except TrainingStopped as error:
        seen.error = str(error)
    progress = trainer.progress
    seen.updates, seen.consumed = progress.updates, progress.consumed_samples
    seen.iterations = progress.iteration
    trainer.report.close()
    trainer.engine.close()
    return seen


def _watch(trainer: Trainer, seen: Watched) -> None:
    step = trainer.engine.step

    def watched(lr: float) -> Any:
        before = _everything(trainer.engine)
        outcome = step(lr)
        seen.moved.append(not _same(before, _everything(trainer.engine)))
        seen.rates.append(lr)
        seen.norms.append(outcome.grad_norm)
        seen.scales.append(outcome.loss_scale)
        seen.applied.append(outcome.applied)
        return outcome

    trainer.engine.step = watched  # type: ignore[method-assign]


def _everything(engine: Engine) -> dict[str, np.ndarray]:
    found = {
        f"{state} {name}": values
        for state in STATES
        for name, values in logical_state(engine, state).items()
    }
    for index, parameter in enumerate(p for m in engine.modules().values() for p in m.parameters()):
        working = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3 keeps its part there
        found[f"working {index}"] = working.detach().float().numpy().copy()
    found["updates"] = np.array(engine.scalars()["optimizer_step"])
    return found


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
