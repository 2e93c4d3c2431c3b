"""The generators: legal for every size, and with the published peak of live activations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule, forward_only
from megatron_lite.pipeline.verify import verify

stages = st.integers(1, 8)
micro_batches = st.integers(1, 16)


def row(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{a.kind}{a.micro_batch}" for a in schedule.actions[rank])


def test_one_f_one_b_table_of_three_stages() -> None:
    schedule = build_schedule("1f1b", num_stages=3, num_microbatches=4)
    assert row(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert row(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert row(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert all(a.stage == rank for rank, acts in enumerate(schedule.actions) for a in acts)


def test_gpipe_table() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_microbatches=3)
    assert row(schedule, 0) == row(schedule, 1) == "F0 F1 F2 B0 B1 B2"


@settings(max_examples=40, deadline=None)
@given(p=stages, m=micro_batches)
def test_one_f_one_b_is_legal_with_published_peaks(p: int, m: int) -> None:
    report = verify(build_schedule("1f1b", num_stages=p, num_microbatches=m))
    assert report.peak_activations == tuple(min(p - s, m) for s in range(p))


@settings(max_examples=40, deadline=None)
@given(p=stages, m=micro_batches)
def test_gpipe_is_legal_and_keeps_every_micro_batch(p: int, m: int) -> None:
    report = verify(build_schedule("gpipe", num_stages=p, num_microbatches=m))
    assert report.peak_activations == (m,) * p


@settings(max_examples=40, deadline=None)
@given(p=stages, m=micro_batches)
def test_forward_only_is_legal_and_keeps_nothing(p: int, m: int) -> None:
    schedule = forward_only(range(p), m)
    assert verify(schedule).peak_activations == (0,) * p
    assert sum(map(len, schedule.actions)) == p * m


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_b24_fewer_micro_batches_than_stages(name: str, m: int) -> None:
    schedule = build_schedule(name, num_stages=4, num_microbatches=m)
    verify(schedule)
    for stage, actions in enumerate(schedule.actions):
        assert [a.micro_batch for a in actions if a.kind == "F"] == list(range(m)), stage
        assert [a.micro_batch for a in actions if a.kind == "B"] == list(range(m)), stage


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_one_stage_sends_nothing_and_starts_with_its_own_forward(name: str) -> None:
    schedule = build_schedule(name, num_stages=1, num_microbatches=2)
    assert verify(schedule)
    assert schedule.actions[0][0] == Action("F", 0, 0)
    assert schedule.placements == ((0,),)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"'2f2b'.*gpipe, 1f1b"):
        build_schedule("2f2b", num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(("p", "m"), [(0, 1), (1, 0), (2, -1)])
def test_sizes_below_one_are_refused(p: int, m: int) -> None:
    with pytest.raises(ScheduleError, match=f"got {p} stages and {m} micro-batches"):
        build_schedule("1f1b", num_stages=p, num_microbatches=m)
    with pytest.raises(ScheduleError, match=f"got {p} stages and {m} micro-batches"):
        forward_only(range(p), m)
