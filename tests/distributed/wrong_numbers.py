"""Runs whose numbers go wrong at one known place, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_lite.guard import TrainingStopped
from megatron_lite.trainer import Trainer
from tests.distributed.runs import Result, make_trainer, train

Where = Literal["weight", "forward", "backward", "loss"]


@dataclass(frozen=True)
class Spoil:
    """A NaN that rank `rank` meets at one place of the model in micro-batch `micro_batch` of
    iteration `iteration`; "loss": the losses of that iteration are 3 times what they are."""

    where: Where
    path: str
    """Of the module (of the parameter: "weight") within the rank's stage."""
    rank: int = 0
    micro_batch: int = 0
    """Which of those that the rank runs through the stage."""
    stage: int | None = None
    """None: the rank's only one."""
    iteration: int = 2
    again: bool = True
    """Also when the step is run again."""
    after_rewinds: bool = False
    """Also when the run has gone back, and in all later iterations."""

    def __call__(self, trainer: Trainer) -> None:
        if dist.get_rank() != self.rank:
            return
        stages = trainer.engine.modules()
        (stage,) = stages.values() if self.stage is None else [stages[self.stage]]
        begin, state = trainer.engine.begin_step, {"step": 0, "forward": -1}

        def begin_step(count: int, *, diagnose: bool = False) -> None:
            begin(count, diagnose=diagnose)
            state["forward"] = -1
            state["active"] = self._is_now(trainer) and (self.again or not diagnose)
            if state["active"] and self.where == "weight":
                for working in trainer.engine.working():
                    if working.parameter is stage.get_parameter(self.path):
                        working.values.view(-1)[1] = float("nan")

        def count_forwards(*_: Any) -> None:
            state["forward"] += 1

        def after(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            if not state["active"] or not torch.is_grad_enabled():
                return output
            if self.where == "loss":
                return 3 * output
            if state["forward"] == self.micro_batch and self.where == "forward":
                return _with_nan(output)
            if state["forward"] == self.micro_batch and self.where == "backward":
                output.register_hook(_with_nan)
            return output

        trainer.engine.begin_step = begin_step  # type: ignore[method-assign]
        if self.where != "weight":
            stage.register_forward_pre_hook(count_forwards)
            stage.get_submodule(self.path).register_forward_hook(after)

    def _is_now(self, trainer: Trainer) -> bool:
        now = trainer.progress.iteration + 1
        if self.after_rewinds:
            return now >= self.iteration
        return now == self.iteration and not trainer.progress.rewinds


def _with_nan(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values.view(-1)[3] = float("nan")
    return values


@dataclass(frozen=True)
class Case:
    """A run and what goes wrong in it."""

    overrides: Sequence[str]
    prepare: Callable[[Trainer], None]


def run_cases(config: Path, cases: Sequence[Case], folder: Path) -> list[str]:
    """Run each in a folder of its own; returns what stopped it, "" where nothing did."""
    errors = []
    for number, case in enumerate(cases):
        run_dir = folder / str(number)
        run_dir.mkdir(exist_ok=True)
        trainer = make_trainer(config, case.overrides, run_dir)
        case.prepare(trainer)
        try:
            trainer.fit()
            errors.append("")
        except TrainingStopped as error:
            errors.append(str(error))
        trainer.train_batches = iter(())
        trainer.report.close()
        trainer.engine.close()
    return errors


def run_two(
    config: Path, first: Case, again: Callable[[Path], Sequence[str]], folder: Path
) -> tuple[Result, Result]:
    """A run and, unspoilt, one that goes on from its checkpoints, in folders a and b."""
    (folder / "a").mkdir(exist_ok=True)
    (folder / "b").mkdir(exist_ok=True)
    one = train(config, first.overrides, folder / "a", first.prepare)
    dist.barrier()
    return one, train(config, [*first.overrides, *again(folder)], folder / "b")
