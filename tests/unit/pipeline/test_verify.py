"""verify refuses what cannot run and nothing else; each refusal names rank, action and reason."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError
from megatron_lite.pipeline.schedules import build_schedule, forward_only
from megatron_lite.pipeline.verify import execution_order, verify

names = st.sampled_from(["gpipe", "1f1b", "forward-only"])


def make(name: str, p: int, m: int) -> Schedule:
    if name == "forward-only":
        return forward_only(range(p), m)
    return build_schedule(name, num_stages=p, num_microbatches=m)


def with_rows(schedule: Schedule, rows: list[list[Action]]) -> Schedule:
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


def runs(schedule: Schedule, seed: int) -> bool:
    """Runs the table by brute force, in random order of ranks, and says whether it came to its end.

    Knows nothing of messages.py: results lie on the rank that made them, and a finished action
    copies its result to the rank of the neighbouring stage.
    """
    rng = random.Random(seed)
    held: list[set[tuple[str, int, int]]] = [set() for _ in schedule.actions]
    queues = [list(row) for row in schedule.actions]
    last = schedule.num_stages - 1

    def ready(rank: int) -> bool:
        action = queues[rank][0]
        s, i = action.stage, action.micro_batch
        if action.kind == "F":
            return s == 0 or ("activation", s - 1, i) in held[rank]
        return ("kept", s, i) in held[rank] and (s == last or ("gradient", s + 1, i) in held[rank])

    while any(queues):
        able = [rank for rank, queue in enumerate(queues) if queue and ready(rank)]
        if not able:
            return False
        rank = rng.choice(able)
        action = queues[rank].pop(0)
        s, i = action.stage, action.micro_batch
        if action.kind == "F":
            held[rank].add(("kept", s, i))
            if s < last:
                held[schedule.rank_of(s + 1, i)].add(("activation", s, i))
        else:
            held[rank].remove(("kept", s, i))
            if s > 0:
                held[schedule.rank_of(s - 1, i)].add(("gradient", s, i))
    return True


@st.composite
def places(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A legal schedule and the rank and position of one of its actions."""
    schedule = make(draw(names), draw(st.integers(1, 8)), draw(st.integers(1, 16)))
    rank = draw(st.integers(0, schedule.num_ranks - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.actions[rank]) - 1))


@settings(max_examples=40, deadline=None)
@given(name=names, p=st.integers(1, 8), m=st.integers(1, 16), seed=st.integers(0, 99))
def test_generated_tables_run_by_brute_force(name: str, p: int, m: int, seed: int) -> None:
    schedule = make(name, p, m)
    assert runs(schedule, seed)
    order = list(execution_order(schedule))
    for rank in range(p):
        assert tuple(a for r, a in order if r == rank) == schedule.actions[rank]


@settings(max_examples=40, deadline=None)
@given(place=places())
def test_a_dropped_action_is_refused(place: tuple[Schedule, int, int]) -> None:
    schedule, rank, position = place
    rows = [list(row) for row in schedule.actions]
    dropped = rows[rank].pop(position)
    with pytest.raises(ScheduleError) as caught:
        verify(with_rows(schedule, rows))
    assert f"rank {rank}: {dropped} is missing" in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(place=places(), target=st.integers(0, 1000))
def test_a_duplicated_action_is_refused(place: tuple[Schedule, int, int], target: int) -> None:
    schedule, rank, position = place
    rows = [list(row) for row in schedule.actions]
    copied = rows[rank][position]
    rows[rank].insert(target % (len(rows[rank]) + 1), copied)
    with pytest.raises(ScheduleError) as caught:
        verify(with_rows(schedule, rows))
    assert f"rank {rank}: {copied} appears 2 times" in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(place=places(), target=st.integers(0, 1000), shift=st.integers(1, 7))
def test_an_action_on_another_rank_is_refused(
    place: tuple[Schedule, int, int], target: int, shift: int
) -> None:
    schedule, rank, position = place
    rows = [list(row) for row in schedule.actions]
    moved = rows[rank].pop(position)
    other = (rank + shift) % schedule.num_ranks
    if other == rank:
        return
    rows[other].insert(target % (len(rows[other]) + 1), moved)
    with pytest.raises(ScheduleError) as caught:
        verify(with_rows(schedule, rows))
    assert f"rank {other}: {moved} is on the wrong rank" in str(caught.value)


def assert_agrees_with_brute_force(schedule: Schedule, seed: int) -> None:
    if runs(schedule, seed):
        verify(schedule)
    else:
        with pytest.raises(ScheduleError, match=r"stands before|deadlock"):
            verify(schedule)


@settings(max_examples=80, deadline=None)
@given(place=places(), target=st.integers(0, 1000), seed=st.integers(0, 99))
def test_swapped_actions_are_refused_or_still_run(
    place: tuple[Schedule, int, int], target: int, seed: int
) -> None:
    schedule, rank, position = place
    rows = [list(row) for row in schedule.actions]
    other = target % len(rows[rank])
    rows[rank][position], rows[rank][other] = rows[rank][other], rows[rank][position]
    assert_agrees_with_brute_force(with_rows(schedule, rows), seed)


@settings(max_examples=80, deadline=None)
@given(place=places(), target=st.integers(0, 1000), seed=st.integers(0, 99))
def test_a_moved_action_is_refused_or_still_runs(
    place: tuple[Schedule, int, int], target: int, seed: int
) -> None:
    schedule, rank, position = place
    rows = [list(row) for row in schedule.actions]
    moved = rows[rank].pop(position)
    rows[rank].insert(target % (len(rows[rank]) + 1), moved)
    assert_agrees_with_brute_force(with_rows(schedule, rows), seed)


def test_swaps_of_a_small_table_include_legal_and_illegal_ones() -> None:
    """The mutation tests above would prove nothing if all swaps fell on one side."""
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=3)
    outcomes = set()
    for rank, row in enumerate(schedule.actions):
        for i in range(len(row)):
            for j in range(i):
                rows = [list(r) for r in schedule.actions]
                rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
                mutant = with_rows(schedule, rows)
                assert_agrees_with_brute_force(mutant, seed=0)
                outcomes.add(runs(mutant, 0))
    assert outcomes == {True, False}


def test_backward_before_its_forward_names_both() -> None:
    schedule = make("1f1b", 1, 1)
    with pytest.raises(ScheduleError) as caught:
        verify(with_rows(schedule, [[Action("B", 0, 0), Action("F", 0, 0)]]))
    assert str(caught.value) == (
        "schedule '1f1b': rank 0: B(stage 0, micro-batch 0) stands before"
        " F(stage 0, micro-batch 0), whose result it needs"
    )


def test_deadlock_names_the_ranks_and_what_they_wait_for() -> None:
    """Each rank puts the other's input behind its own wait, though each list alone is in order."""
    rows = [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)],
        [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)],
    ]
    with pytest.raises(ScheduleError) as caught:
        verify(with_rows(make("gpipe", 2, 2), rows))
    assert str(caught.value) == (
        "schedule 'gpipe': deadlock: rank 0 at B(stage 0, micro-batch 0) waits for gradient for"
        " stage 0, micro-batch 0 (rank 1 to rank 0); rank 1 at F(stage 1, micro-batch 1) waits for"
        " activation for stage 1, micro-batch 1 (rank 0 to rank 1)"
    )


def test_two_stages_on_one_rank_need_the_earlier_stage_first() -> None:
    schedule = Schedule.one_way(
        "both",
        placement=(0, 0),
        num_microbatches=1,
        actions=((Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)),),
    )
    assert verify(schedule).peak_activations == (2,)
    rows = [[Action("F", 1, 0), Action("F", 0, 0), Action("B", 1, 0), Action("B", 0, 0)]]
    with pytest.raises(ScheduleError, match=r"F\(stage 1.*stands before F\(stage 0"):
        verify(with_rows(schedule, rows))


def test_forward_only_must_be_declared() -> None:
    schedule = replace(forward_only(range(2), 1), forward_only=False)
    with pytest.raises(ScheduleError, match=r"rank 0: B\(stage 0, micro-batch 0\) is missing"):
        verify(schedule)


def test_a_backward_in_a_forward_only_table_is_refused() -> None:
    schedule = replace(make("gpipe", 2, 1), forward_only=True)
    with pytest.raises(ScheduleError, match=r"rank 0: B\(.*does not belong"):
        verify(schedule)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_ranks": 3}, "2 lists of actions for 3 ranks"),
        ({"placements": ((0,),)}, "placement 0 names 1 stages of 2"),
        ({"placements": ((0, 2),)}, "puts stage 1 on rank 2, but ranks go from 0 to 1"),
        ({"num_microbatches": 0}, "must be at least 1"),
        ({"num_microbatches": 1}, "2 directions for 1 micro-batches"),
        ({"directions": (0, 1)}, "micro-batch 1 has direction 1, but there are 1 placements"),
        (
            {"num_microbatches": 1, "directions": (0,)},
            r"rank 0: F\(stage 0, micro-batch 1\) does not belong",
        ),
    ],
)
def test_inconsistent_tables_are_refused(change: dict[str, object], reason: str) -> None:
    schedule = replace(make("gpipe", 2, 2), **change)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=reason):
        verify(schedule)
