"""Activations are freed as soon as the table allows: at every action of every schedule, by weak
references and not by what the executor counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.executor import PipelineExecutor, Program
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.verify import verify
from tests.distributed.chain import ROWS, WIDTH, Stages, micro_batches
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import make_trainer
from tests.distributed.schedules import SCHEDULES, overrides
from tests.distributed.traced import Alive, Traced, assert_freed, peak
from tests.random_tables import random_table

RANKS, COUNT = 4, 8


def tables() -> list[Schedule]:
    """Every schedule's, and random ones of any kind."""
    sizes = {"num_ranks": RANKS, "num_microbatches": COUNT}
    named = [
        build_schedule(name, **sizes, virtual=2 if name == "interleaved" else None)
        for name in SCHEDULES
    ]
    return [*named, *(random_table(seed, RANKS) for seed in range(140, 160))]


def trace_tables() -> list[list[Alive]]:
    """This rank's view of every table, with the small stages; nothing is left of any."""
    groups = ProcessGroups.create(Grid(pp_size=RANKS, rank=dist.get_rank()))
    found = []
    for table in tables():
        traced = Traced(Stages(table.num_stages), table, groups.pipeline.rank)
        executor = PipelineExecutor(groups, traced, dtype=torch.float64, device=torch.device("cpu"))
        executor.run(
            Program(table, groups.pipeline.rank),
            micro_batches(table.num_microbatches),
            hidden_shape=(ROWS, WIDTH),
            loss_gradient=torch.tensor(1.0, dtype=torch.float64),
        )
        assert not any(traced.now()), table.name
        found.append(traced.seen)
    return found


def check(table: Schedule, rank: int, seen: Sequence[Alive]) -> None:
    """Nothing outlives its use, so the peaks are the verifier's."""
    assert_freed(table, rank, seen)
    report = verify(table)
    assert peak(seen, lambda alive: len(alive.graphs)) == report.peak_activations[rank]
    until_weights = peak(seen, lambda alive: len(alive.graphs | alive.halves))
    assert until_weights == report.peak_until_weights[rank]


def test_nothing_outlives_its_use() -> None:
    for rank, of_tables in enumerate(on_ranks(RANKS, trace_tables)):
        for table, seen in zip(tables(), of_tables, strict=True):
            check(table, rank, seen)


def trace_training(
    config: Path, runs: Sequence[Sequence[str]], run_dir: Path
) -> list[tuple[Schedule, list[Alive]]]:
    """The same of two steps of real training each."""
    found = []
    for overriding in runs:
        trainer = make_trainer(config, overriding, run_dir)
        table = trainer.plan.training(COUNT)
        traced = Traced(trainer.engine, table, trainer.groups.pipeline.rank)
        trainer.executor = trainer.executor.computing(traced)
        trainer.fit()
        assert not any(traced.now()), table.name
        trainer.train_batches = iter(())
        trainer.report.close()
        trainer.engine.close()
        found.append((table, traced.seen))
    return found


def test_nothing_outlives_its_use_in_training(
    deep_configs: dict[str, Path], tmp_path: Path
) -> None:
    """One way, two ways, and a split backward on two stages a rank."""
    runs = [
        [*overrides(name, RANKS, 2), "training.train_iters=2"]
        for name in ("1f1b", "chimera", "zbv")
    ]
    found = on_ranks(RANKS, trace_training, deep_configs["tied"], runs, tmp_path, watchdog=120)
    for rank, of_runs in enumerate(found):
        for table, seen in of_runs:
            assert len(seen) == 2 * len(table.actions[rank])
            check(table, rank, seen)
