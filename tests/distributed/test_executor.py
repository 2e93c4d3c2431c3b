"""The executor runs any legal table: random ones, several stages on a rank, real tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.executor import PipelineExecutor, Program
from megatron_lite.pipeline.messages import needs
from megatron_lite.pipeline.p2p import Mailbox
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.verify import verify
from tests.distributed.chain import ROWS, WIDTH, Stages, micro_batches
from tests.distributed.ranks import on_ranks
from tests.random_tables import random_table

TABLES = {2: range(80), 3: range(80, 140), 4: range(140, 200)}
"""Seeds of the random tables, by number of ranks."""


@dataclass
class Outcome:
    """What one rank made of a table."""

    losses: dict[int, float]
    """By micro-batch, of those whose last stage is here."""
    gradients: dict[int, np.ndarray]
    """By stage; of the micro-batches that passed through it here."""
    peak: int = 0
    """Activations alive at a time."""


def run_table(schedule: Schedule, groups: ProcessGroups) -> Outcome:
    rank = groups.pipeline.rank
    model = Stages(schedule.num_stages)
    executor = PipelineExecutor(groups, model, dtype=torch.float64, device=torch.device("cpu"))
    losses = executor.run(
        Program(schedule, rank),
        micro_batches(schedule.num_microbatches),
        hidden_shape=(ROWS, WIDTH),
        loss_gradient=torch.tensor(0.5, dtype=torch.float64),
    )
    last = schedule.num_stages - 1
    order = [a.micro_batch for a in schedule.actions[rank] if a.kind == "F" and a.stage == last]
    by_number = dict(zip(order, (loss.item() for loss in losses), strict=True))
    return Outcome(by_number, model.gradients(), executor.peak_activations)


def one_process(schedule: Schedule) -> Outcome:
    """The same by plain autograd."""
    model, losses = Stages(schedule.num_stages), {}
    for number, micro_batch in enumerate(micro_batches(schedule.num_microbatches)):
        value: Tensor | None = None
        for stage in range(schedule.num_stages):
            value = model.forward(stage, micro_batch, value)
        assert value is not None
        (0.5 * value).backward()
        losses[number] = value.item()
    return Outcome(losses, model.gradients())


def run_tables(seeds: range) -> list[Outcome]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroups.create(Grid(pp_size=ranks, rank=rank))
    return [run_table(random_table(seed, ranks), groups) for seed in seeds]


def check_tables(ranks: int) -> None:
    """Every loss is where its last stage is, the parts of a gradient add up to the whole, and as
    many activations were alive as the verifier says."""
    seeds = TABLES[ranks]
    schedules = [random_table(seed, ranks) for seed in seeds]
    found = on_ranks(ranks, run_tables, seeds)
    for i, schedule in enumerate(schedules):
        expected = one_process(schedule)
        of_ranks = [of_rank[i] for of_rank in found]
        for rank, outcome in enumerate(of_ranks):
            last = schedule.num_stages - 1
            here = {
                m: loss for m, loss in expected.losses.items() if schedule.rank_of(last, m) == rank
            }
            assert outcome.losses == pytest.approx(here, rel=1e-12), schedule.name
        for stage, whole in expected.gradients.items():
            parts = [o.gradients[stage] for o in of_ranks if stage in o.gradients]
            np.testing.assert_allclose(sum(parts), whole, rtol=1e-11, atol=1e-12)
        assert tuple(o.peak for o in of_ranks) == verify(schedule).peak_activations


def test_random_tables_on_two_ranks_equal_one_process() -> None:
    check_tables(2)


def test_random_tables_on_three_ranks_equal_one_process() -> None:
    check_tables(3)


def test_random_tables_on_four_ranks_equal_one_process() -> None:
    check_tables(4)


def test_the_tables_are_legal_and_not_alike() -> None:
    """Among them: several stages on a rank, hand-overs without a message, messages both ways, two
    directions, split backwards."""
    tables = [random_table(seed, ranks) for ranks, seeds in TABLES.items() for seed in seeds]
    assert len(tables) == 200
    for table in tables:
        verify(table)
    assert any(needs(t, Action("F", s, 0)) is None for t in tables for s in range(1, t.num_stages))
    downward = [t for t in tables if any(a > b for a, b in pairwise(t.placements[0]))]
    assert len(downward) > len(tables) / 2
    assert len([t for t in tables if len(t.placements) > 1]) > 20
    assert 50 < len([t for t in tables if t.split_backward]) < 150


def buffers_of_two_runs() -> list[int]:
    """How many receive buffers each of two 1F1B steps of 12 micro-batches allocates."""
    groups = ProcessGroups.create(Grid(pp_size=2, rank=dist.get_rank()))
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=12)
    made, buffer = [0], Mailbox._buffer

    def counting(self: Mailbox) -> Tensor:
        made[-1] += 1
        return buffer(self)

    Mailbox._buffer = counting  # type: ignore[method-assign]
    executor = PipelineExecutor(groups, Stages(2), dtype=torch.float64, device=torch.device("cpu"))
    for _ in range(2):
        executor.run(
            Program(schedule, groups.pipeline.rank),
            micro_batches(12),
            hidden_shape=(ROWS, WIDTH),
            loss_gradient=torch.tensor(1.0, dtype=torch.float64),
        )
        made.append(0)
    return made


def test_receive_buffers_are_used_again() -> None:
    for first, second, _ in on_ranks(2, buffers_of_two_runs):
        assert 1 <= first <= 3, "one that is read, one on its way"
        assert second == 0


class Watched(Stages):
    """Notes which outputs hang on a graph."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.attached: list[bool] = []

    def forward(self, stage: int, micro_batch: Tensor, hidden: Tensor | None) -> Tensor:
        output = super().forward(stage, micro_batch, hidden)
        self.attached.append(output.requires_grad)
        return output


def forward_only_keeps_nothing() -> list[bool]:
    """Whether the outputs of a table without backwards hang on a graph."""
    groups = ProcessGroups.create(Grid(pp_size=2, rank=dist.get_rank()))
    model = Watched(2)
    executor = PipelineExecutor(groups, model, dtype=torch.float64, device=torch.device("cpu"))
    table = Schedule.one_way(
        "evaluation",
        placement=(0, 1),
        num_microbatches=2,
        actions=[[Action("F", s, m) for m in (1, 0)] for s in (0, 1)],
        forward_only=True,
    )
    executor.run(Program(table, groups.pipeline.rank), micro_batches(2), hidden_shape=(ROWS, WIDTH))
    return model.attached


def test_a_forward_only_table_builds_no_graph() -> None:
    assert on_ranks(2, forward_only_keeps_nothing) == [[False, False], [False, False]]
