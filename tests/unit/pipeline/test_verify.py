"""What verify says: rank, action and reason of each refusal, and the peaks of what is kept.

That it refuses what cannot run and nothing else is in test_mutations.py.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError
from megatron_lite.pipeline.schedules import build_schedule, forward_only
from megatron_lite.pipeline.verify import verify


def make(name: str, p: int, m: int) -> Schedule:
    return build_schedule(name, num_stages=p, num_microbatches=m)


def with_rows(schedule: Schedule, rows: list[list[Action]]) -> Schedule:
    return replace(schedule, actions=tuple(tuple(row) for row in rows))


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


def test_a_short_table_of_large_sizes_costs_little() -> None:
    """Sizes alone, 300 stages and micro-batches, would make 180,000 actions, some 40 MB."""
    row = [Action("F", stage, 0) for stage in range(300)]
    schedule = Schedule.one_way("1f1b", placement=(0,) * 300, num_microbatches=300, actions=[row])
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=r"rank 0: B\(stage 0, micro-batch 0\) is missing"):
            verify(schedule)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1_000_000


def test_an_action_of_another_rank_is_refused_even_where_it_stands_on_its_own_too() -> None:
    rows = [list(row) for row in make("gpipe", 2, 1).actions]
    rows[1].append(rows[0][0])
    with pytest.raises(ScheduleError, match=r"rank 1: F\(stage 0.* its stage is on rank 0"):
        verify(with_rows(make("gpipe", 2, 1), rows))


def split_table(*row: str) -> Schedule:
    """One rank with one stage and a row such as F0 B0 W0, kind and micro-batch."""
    actions = [Action(text[0], 0, int(text[1:])) for text in row]  # type: ignore[arg-type]
    return Schedule.one_way(
        "split",
        placement=(0,),
        num_microbatches=sum(action.kind == "F" for action in actions),
        actions=[actions],
        split_backward=True,
    )


def test_weights_before_their_backward_are_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(split_table("F0", "W0", "B0"))
    assert str(caught.value) == (
        "schedule 'split': rank 0: W(stage 0, micro-batch 0) stands before"
        " B(stage 0, micro-batch 0), whose result it needs"
    )


def test_weights_belong_to_a_split_table_only() -> None:
    schedule = split_table("F0", "B0", "W0")
    with pytest.raises(ScheduleError, match=r"W\(stage 0, micro-batch 0\) does not belong"):
        verify(replace(schedule, split_backward=False))
    with pytest.raises(ScheduleError, match=r"W\(stage 0, micro-batch 1\) is missing"):
        verify(split_table("F0", "F1", "B0", "B1", "W0"))


def test_what_is_kept_is_counted_until_b_and_until_w() -> None:
    report = verify(
        split_table("F0", "B0", "F1", "B1", "F2", "F3", "B2", "W0", "W1", "B3", "W2", "W3")
    )
    assert report.peak_activations == (2,)
    assert report.peak_until_weights == (4,)
    whole = verify(make("1f1b", 3, 4))
    assert whole.peak_activations == whole.peak_until_weights == (3, 2, 1)


def test_a_stage_may_be_on_another_rank_for_another_direction() -> None:
    """Two stages, two micro-batches against each other; each rank has both stages."""
    rows = (
        (Action("F", 0, 0), Action("F", 1, 1), Action("B", 1, 1), Action("B", 0, 0)),
        (Action("F", 0, 1), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 1)),
    )
    schedule = Schedule("both ways", 2, 2, 2, ((0, 1), (1, 0)), (0, 1), rows)
    assert verify(schedule).peak_activations == (2, 2)
    assert schedule.held_by(0) == ((0, 0), (1, 1))
    assert [schedule.rank_of(0, i) for i in (0, 1)] == [0, 1]
    with pytest.raises(ScheduleError, match=r"rank 0: F\(stage 1, micro-batch 1\) is on the wrong"):
        verify(replace(schedule, directions=(0, 0)))
