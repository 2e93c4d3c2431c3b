"""Several small runs in one set of processes: starting them costs more than the runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, train


@dataclass(frozen=True)
class Run:
    """A config, what to change in it, and in the trainer (a function that can be pickled)."""

    config: Path
    overrides: Sequence[str] = ()
    prepare: Callable[[Trainer], None] | None = None


def train_all(runs: Sequence[Run], folder: Path) -> list[Result]:
    """This rank's results, run by run."""
    results = []
    for number, run in enumerate(runs):
        run_dir = folder / str(number)
        run_dir.mkdir(exist_ok=True)
        results.append(train(run.config, run.overrides, run_dir, run.prepare))
    return results


def train_on(world_size: int, runs: Sequence[Run], folder: Path) -> list[list[Result]]:
    """For each run what each of `world_size` ranks saw of it."""
    inner = folder / f"ranks-{world_size}"
    inner.mkdir()
    of_rank = on_ranks(world_size, train_all, runs, inner, watchdog=240)
    return [list(of_run) for of_run in zip(*of_rank, strict=True)]
