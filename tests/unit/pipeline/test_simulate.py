"""Times of a schedule against the published bubble formulas and against hand-drawn tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.actions import Action, ScheduleError
from megatron_lite.pipeline.messages import supplier
from megatron_lite.pipeline.schedules import build_schedule, forward_only
from megatron_lite.pipeline.simulate import simulate

schedule_names = st.sampled_from(["gpipe", "1f1b"])


@settings(max_examples=60, deadline=None)
@given(
    name=schedule_names,
    p=st.integers(1, 8),
    m=st.integers(1, 16),
    forward=st.sampled_from([0.5, 1.0, 3.0]),
    backward=st.sampled_from([0.5, 2.0]),
)
def test_bubble_is_the_published_one(
    name: str, p: int, m: int, forward: float, backward: float
) -> None:
    """(p - 1) / (m + p - 1) of the step is idle, for GPipe and 1F1B alike (arXiv:2104.04473)."""
    schedule = build_schedule(name, num_stages=p, num_microbatches=m)
    timeline = simulate(schedule, durations={"F": forward, "B": backward})
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert timeline.makespan == pytest.approx((m + p - 1) * (forward + backward))


@settings(max_examples=40, deadline=None)
@given(
    name=schedule_names,
    p=st.integers(1, 8),
    m=st.integers(1, 16),
    p2p_time=st.sampled_from([0.0, 0.25]),
)
def test_no_action_starts_before_its_rank_and_its_input_are_ready(
    name: str, p: int, m: int, p2p_time: float
) -> None:
    schedule = build_schedule(name, num_stages=p, num_microbatches=m)
    timeline = simulate(schedule, durations={"F": 1.0, "B": 2.0}, p2p_time=p2p_time)
    end = {timed.action: timed.end for row in timeline.rows for timed in row}
    for row, actions in zip(timeline.rows, schedule.actions, strict=True):
        assert tuple(timed.action for timed in row) == actions
        free = 0.0
        for timed in row:
            giver = supplier(schedule, timed.action)
            input_ready = 0.0 if giver is None else end[giver] + p2p_time
            assert timed.start == max(free, input_ready)
            free = timed.end
    assert timeline.makespan == max(end.values())


def test_times_of_two_stages_by_hand() -> None:
    """Rank 0: F0 0-1, F1 1-2, B0 4-6, B1 7-9; rank 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7."""
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    rows = simulate(schedule, durations={"F": 1.0, "B": 2.0}).rows
    assert [(t.start, t.end) for t in rows[0]] == [(0, 1), (1, 2), (4, 6), (7, 9)]
    assert [(t.start, t.end) for t in rows[1]] == [(1, 2), (2, 4), (4, 5), (5, 7)]
    assert rows[1][1].action == Action("B", 1, 0)


def test_p2p_time_delays_each_hop_and_hides_behind_compute() -> None:
    """Two hops of 0.5 on the critical path of one micro-batch; none of them occupies a rank."""
    schedule = build_schedule("gpipe", num_stages=2, num_microbatches=1)
    timeline = simulate(schedule, durations={"F": 1.0, "B": 2.0}, p2p_time=0.5)
    assert timeline.makespan == 7.0
    many = build_schedule("gpipe", num_stages=2, num_microbatches=8)
    assert simulate(many, durations={"F": 1.0, "B": 2.0}, p2p_time=0.5).makespan == 28.0


def test_forward_only_needs_no_backward_duration() -> None:
    timeline = simulate(forward_only(range(3), 4), durations={"F": 1.0})
    assert timeline.makespan == 6.0
    assert timeline.bubble_fraction == pytest.approx(2 / 6)


def test_bad_times_are_refused() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_microbatches=1)
    with pytest.raises(ValueError, match="duration of B must be above 0"):
        simulate(schedule, durations={"F": 1.0, "B": 0.0})
    with pytest.raises(ValueError, match="p2p_time must be at least 0"):
        simulate(schedule, durations={"F": 1.0, "B": 2.0}, p2p_time=-1.0)


def test_a_deadlock_is_reported_not_timed() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_microbatches=1)
    backward_first = (schedule.actions[0][::-1], schedule.actions[1])
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(replace(schedule, actions=backward_first), durations={"F": 1.0, "B": 2.0})
