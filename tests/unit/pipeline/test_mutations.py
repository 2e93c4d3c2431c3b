"""verify accepts exactly what a brute-force run can do, for tables changed in every way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule, forward_only
from megatron_lite.pipeline.verify import execution_order, verify
from tests.brute_force import comes_to_its_end
from tests.random_tables import random_table

Rows = list[list[Action]]


def small_table(kind: str, chance: random.Random) -> Schedule:
    """A named or a random table of few ranks and micro-batches."""
    ranks = chance.choice((1, 2, 2, 3, 4, 4, 6))
    if kind == "random":
        return random_table(chance.randrange(10**6), ranks)
    ranks += ranks % 2 if kind == "chimera" else 0
    count = chance.randrange(1, 9)
    step = {"interleaved": ranks, "chimera": 2}.get(kind, 1)
    count = max(step, count // step * step)
    virtual = chance.choice((2, 3)) if kind == "interleaved" else None
    return build_schedule(kind, num_ranks=ranks, num_microbatches=count, virtual=virtual)


def drop(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    row.pop(i)


def duplicate(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    row.insert(chance.randrange(len(row) + 1), row[i])


def swap(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    j = chance.randrange(len(row))
    row[i], row[j] = row[j], row[i]


def swap_neighbours(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    j = min(i + 1, len(row) - 1)
    row[i], row[j] = row[j], row[i]


def move(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    action = row.pop(i)
    row.insert(chance.randrange(len(row) + 1), action)


def move_to_another_rank(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    action, other = row.pop(i), chance.choice(rows)
    other.insert(chance.randrange(len(other) + 1), action)


def swap_ranks(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    other = chance.choice([r for r in rows if r])
    j = chance.randrange(len(other))
    row[i], other[j] = other[j], row[i]


def other_stage(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    row[i] = replace(row[i], stage=row[i].stage + chance.choice((-1, 1)))


def other_micro_batch(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    row[i] = replace(row[i], micro_batch=row[i].micro_batch + chance.choice((-2, -1, 1, 2)))


def other_kind(rows: Rows, row: list[Action], i: int, chance: random.Random) -> None:
    row[i] = replace(row[i], kind=chance.choice("FBW"))


CHANGES: tuple[Callable[[Rows, list[Action], int, random.Random], None], ...] = (
    *(drop, duplicate, swap, swap_neighbours, move, move_to_another_rank, swap_ranks),
    *(other_stage, other_micro_batch, other_kind),
)


def mutant(schedule: Schedule, chance: random.Random, *, changes: int) -> Schedule:
    """`schedule` changed in a few places."""
    rows = [list(row) for row in schedule.actions]
    for _ in range(changes):
        row = chance.choice([row for row in rows if row] or [[Action("F", 0, 0)]])
        chance.choice(CHANGES)(rows, row, chance.randrange(len(row)), chance)
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def within(schedule: Schedule) -> bool:
    """Whether all stages and micro-batches exist: the brute force has no answer for others."""
    return all(
        0 <= a.stage < schedule.num_stages and 0 <= a.micro_batch < schedule.num_microbatches
        for row in schedule.actions
        for a in row
    )


def judged(schedule: Schedule) -> bool:
    """What verify says."""
    try:
        verify(schedule)
    except ScheduleError:
        return False
    return True


def judge_mutants(kind: str, seeds: range) -> Counter[bool]:
    """Both judges on a mutant of each seed's table; how many were legal and illegal."""
    verdicts: Counter[bool] = Counter()
    for seed in seeds:
        chance = random.Random(f"{kind} {seed}")
        changed = mutant(small_table(kind, chance), chance, changes=chance.choice((1, 1, 1, 2, 3)))
        legal = within(changed) and comes_to_its_end(changed, seed)
        assert judged(changed) == legal, f"{kind}, seed {seed}: {changed.actions}"
        verdicts[legal] += 1
    return verdicts


@pytest.mark.parametrize("kind", [*SCHEDULES, "random"])
def test_a_changed_table_is_refused_or_still_runs(kind: str) -> None:
    verdicts = judge_mutants(kind, range(150))
    assert verdicts[True] > 5 and verdicts[False] > 50  # else one of the judges is asleep


@pytest.mark.every
@pytest.mark.parametrize("kind", [*SCHEDULES, "random"])
def test_many_changed_tables_are_refused_or_still_run(kind: str) -> None:
    judge_mutants(kind, range(150, 10_000))


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_random_tables_are_legal(ranks: int, seed: int) -> None:
    schedule = random_table(seed, ranks)
    verify(schedule)
    assert comes_to_its_end(schedule, seed)
    order = list(execution_order(schedule))
    for rank in range(ranks):
        assert tuple(a for r, a in order if r == rank) == schedule.actions[rank]


def test_random_tables_are_of_every_sort() -> None:
    tables = [random_table(seed, 3) for seed in range(60)]
    assert {len(table.placements) for table in tables} == {1, 2}
    assert {table.split_backward for table in tables} == {True, False}
    assert len({table.actions for table in tables}) == 60


@pytest.mark.parametrize("change", [drop, duplicate, move_to_another_rank])
def test_lost_repeated_and_misplaced_work_is_named(
    change: Callable[[Rows, list[Action], int, random.Random], None],
) -> None:
    """The reason names the rank and the action, on every schedule."""
    words = {drop: "is missing", duplicate: "appears 2 times"}
    for name in SCHEDULES:
        chance = random.Random(name)
        schedule = small_table(name, chance)
        while schedule.num_ranks < 3:
            schedule = small_table(name, chance)
        rows = [list(row) for row in schedule.actions]
        rank = chance.randrange(len(rows))
        i = chance.randrange(len(rows[rank]))
        action = rows[rank][i]
        if change is move_to_another_rank:
            rows[rank].pop(i)
            away = (rank + 1) % len(rows)
            rows[away].insert(0, action)
            where, word = f"rank {away}: {action}", f"wrong rank: its stage is on rank {rank}"
        else:
            change(rows, rows[rank], i, chance)
            where, word = f"rank {rank}: {action}", words[change]
        with pytest.raises(ScheduleError) as caught:
            verify(replace(schedule, actions=tuple(tuple(row) for row in rows)))
        assert where in str(caught.value) and word in str(caught.value)


def test_swaps_of_a_small_table_include_legal_and_illegal_ones() -> None:
    """The mutations above would prove nothing if all swaps fell on one side."""
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=3)
    outcomes = set()
    for rank, row in enumerate(schedule.actions):
        for i in range(len(row)):
            for j in range(i):
                rows = [list(r) for r in schedule.actions]
                rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
                changed = replace(schedule, actions=tuple(tuple(r) for r in rows))
                assert judged(changed) == comes_to_its_end(changed, 0)
                outcomes.add(judged(changed))
    assert outcomes == {True, False}


def test_forwards_alone_are_legal_for_any_placement() -> None:
    for seed in range(30):
        placement = random_table(seed, 4).placements[0]
        verify(forward_only(placement, 1 + seed % 9))
