"""The executor runs any legal table: random ones, several stages on a rank, real tensors."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.executor import PipelineExecutor, Program, Root
from megatron_lite.pipeline.messages import needs
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.verify import verify
from tests.distributed.ranks import on_ranks

WIDTH, ROWS = 6, 3
TABLES = {2: range(8), 3: range(8, 14), 4: range(14, 20)}
"""Seeds of the random tables, by number of ranks."""


def random_table(seed: int, ranks: int) -> Schedule:
    """A legal table: the actions of all stages in a random order in which each finds its input.

    Stages lie on random ranks, every rank has one at least.
    """
    chance = random.Random(seed)
    stages, count = ranks + chance.randrange(4), 1 + chance.randrange(5)
    homes = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(homes)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    left = [Action(k, s, m) for k in ("F", "B") for s in range(stages) for m in range(count)]  # type: ignore[arg-type]
    while left:
        action = chance.choice([a for a in left if _inputs(a, stages) <= done])
        left.remove(action)
        done.add(action)
        rows[homes[action.stage]].append(action)
    return Schedule.one_way(f"random {seed}", placement=homes, num_microbatches=count, actions=rows)


def _inputs(action: Action, stages: int) -> set[Action]:
    """What must have run before, on whatever rank."""
    stage, micro = action.stage, action.micro_batch
    if action.kind == "F":
        return {Action("F", stage - 1, micro)} if stage else set()
    own = {Action("F", stage, micro)}
    return own if stage == stages - 1 else own | {Action("B", stage + 1, micro)}


class Stages:
    """A chain of tanh(linear) layers in double precision; the last one's loss is a weighted sum."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(count)
        self.layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(count)]

    def forward(self, stage: int, micro_batch: Tensor, hidden: Tensor | None) -> Tensor:
        inner = torch.tanh(self.layers[stage](micro_batch if hidden is None else hidden))
        last = stage == len(self.layers) - 1
        return (inner * micro_batch).sum() if last else inner

    @staticmethod
    def backward(output: Root, gradient: Tensor) -> None:
        torch.autograd.backward(output, gradient)

    def backward_input(self, output: Root, gradient: Tensor) -> Any:
        raise NotImplementedError

    def backward_weight(self, waiting: Any) -> None:
        raise NotImplementedError

    def gradients(self, stages: list[int]) -> dict[int, np.ndarray]:
        """The gradient of each stage's weights."""
        found = {}
        for stage in stages:
            grad = self.layers[stage].weight.grad
            assert grad is not None
            found[stage] = grad.numpy()
        return found


def micro_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return list(torch.randn(count, ROWS, WIDTH, generator=generator, dtype=torch.float64))


def run_table(
    schedule: Schedule, groups: ProcessGroups
) -> tuple[list[float], dict[int, np.ndarray]]:
    """Losses by micro-batch (on the last stage's rank) and gradients of this rank's stages."""
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
    mine = [stage for _, stage in schedule.held_by(rank)]
    return [by_number[i] for i in sorted(by_number)], model.gradients(mine)


def one_process(schedule: Schedule) -> tuple[list[float], dict[int, np.ndarray]]:
    """The same by plain autograd."""
    model, losses = Stages(schedule.num_stages), []
    for micro_batch in micro_batches(schedule.num_microbatches):
        value: Tensor | None = None
        for stage in range(schedule.num_stages):
            value = model.forward(stage, micro_batch, value)
        assert value is not None
        (0.5 * value).backward()
        losses.append(value.item())
    return losses, model.gradients(list(range(schedule.num_stages)))


def run_tables(seeds: range) -> list[tuple[list[float], dict[int, np.ndarray]]]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroups.create(Grid(pp_size=ranks, rank=rank))
    return [run_table(random_table(seed, ranks), groups) for seed in seeds]


def check_tables(ranks: int) -> None:
    seeds = TABLES[ranks]
    schedules = [random_table(seed, ranks) for seed in seeds]
    found = on_ranks(ranks, run_tables, seeds)
    for i, schedule in enumerate(schedules):
        losses, gradients = one_process(schedule)
        home = schedule.placements[0][-1]
        np.testing.assert_allclose(found[home][i][0], losses, rtol=1e-12, err_msg=schedule.name)
        assert all(found[r][i][0] == [] for r in range(ranks) if r != home)
        held = {stage: grad for of_rank in found for stage, grad in of_rank[i][1].items()}
        assert held.keys() == gradients.keys()
        for stage, grad in gradients.items():
            np.testing.assert_allclose(held[stage], grad, rtol=1e-12, atol=1e-12)


def test_random_tables_on_two_ranks_equal_one_process() -> None:
    check_tables(2)


def test_random_tables_on_three_ranks_equal_one_process() -> None:
    check_tables(3)


def test_random_tables_on_four_ranks_equal_one_process() -> None:
    check_tables(4)


def test_the_tables_are_legal_and_not_alike() -> None:
    """Among them: several stages on a rank, hand-overs without a message, messages both ways."""
    tables = [random_table(seed, ranks) for ranks, seeds in TABLES.items() for seed in seeds]
    for table in tables:
        verify(table)
    assert any(needs(t, Action("F", s, 0)) is None for t in tables for s in range(1, t.num_stages))
    downward = [t for t in tables if any(a > b for a, b in pairwise(t.placements[0]))]
    assert len(downward) > len(tables) / 2
    known = {build_schedule(n, num_stages=2, num_microbatches=2).actions for n in ("gpipe", "1f1b")}
    assert not known & {t.actions for t in tables}


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
