"""The named schedules: their tables by hand, legal for every size, refused sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline import schedules
from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError
from megatron_lite.pipeline.chimera import chimera
from megatron_lite.pipeline.classic import one_f_one_b
from megatron_lite.pipeline.greedy import in_ticks
from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.pipeline.schedules import (
    SCHEDULES,
    Family,
    build_schedule,
    chunks_a_rank,
    forward_only,
)
from megatron_lite.pipeline.simulate import Times
from megatron_lite.pipeline.verify import Report, verify

MOST_LIVE = {
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: min(p, m),
    "interleaved": lambda p, m, v: v * p + p - 1,
    "chimera": lambda p, m, v: p,
    "zb-h1": lambda p, m, v: min(p, m),
    "zbv": lambda p, m, v: 2 * p,
    "dualpipev": lambda p, m, v: 2 * p + 1,
}
"""The most micro-batches of one stage that a rank may keep alive until B."""


def row(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{a.kind}{a.micro_batch}" for a in schedule.actions[rank])


def row_with_stages(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{a.kind}{a.stage}.{a.micro_batch}" for a in schedule.actions[rank])


def step_of(name: str, p: int) -> int:
    """What must divide the number of micro-batches."""
    return {"interleaved": p, "chimera": 2}.get(name, 1)


def virtual_of(name: str, v: int) -> int | None:
    return v if SCHEDULES[name].chunks is None else None


def check(name: str, p: int, m: int, v: int) -> Report:
    """The table is legal, complete, and within the memory that it is said to need."""
    schedule = build_schedule(name, num_ranks=p, num_microbatches=m, virtual=virtual_of(name, v))
    report = verify(schedule)
    assert max(report.peak_activations) <= MOST_LIVE[name](p, m, v)
    if name in ("zb-h1", "zbv"):
        assert max(report.peak_until_weights) <= MOST_LIVE[name](p, m, v)
    return report


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """All (p, m, v) of 1–16 ranks, 1–64 micro-batches and 2–4 stages a rank for a schedule."""
    for p, m, v in product(range(1, 17), range(1, 65), range(2, 5)):
        even = name != "chimera" or p % 2 == 0
        if even and m % step_of(name, p) == 0 and (v == 2 or virtual_of(name, v)):
            yield p, m, v


def test_one_f_one_b_table_of_three_stages() -> None:
    schedule = build_schedule("1f1b", num_stages=3, num_microbatches=4)
    assert row(schedule, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert row(schedule, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert row(schedule, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert all(a.stage == rank for rank, acts in enumerate(schedule.actions) for a in acts)


def test_gpipe_table() -> None:
    schedule = build_schedule("gpipe", num_stages=2, num_microbatches=3)
    assert row(schedule, 0) == row(schedule, 1) == "F0 F1 F2 B0 B1 B2"


def test_interleaved_table_of_two_ranks() -> None:
    schedule = build_schedule("interleaved", num_stages=4, num_ranks=2, num_microbatches=2)
    assert schedule.placements == ((0, 1, 0, 1),)
    assert row_with_stages(schedule, 0) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert row_with_stages(schedule, 1) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"


def test_zb_h1_table_of_three_stages() -> None:
    schedule = build_schedule("zb-h1", num_ranks=3, num_microbatches=4)
    assert row(schedule, 0) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert row(schedule, 1) == "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"
    assert row(schedule, 2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_chimera_table_of_two_ranks() -> None:
    schedule = build_schedule("chimera", num_ranks=2, num_microbatches=2)
    assert schedule.placements == ((0, 1), (1, 0))
    assert schedule.directions == (0, 1)
    assert row_with_stages(schedule, 0) == "F0.0 F1.1 B1.1 B0.0"
    assert row_with_stages(schedule, 1) == "F0.1 F1.0 B1.0 B0.1"


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_a_v_comes_back_to_the_rank_that_it_started_on(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=6)
    assert schedule.placements == ((0, 1, 2, 2, 1, 0),)
    assert schedule.split_backward
    assert row_with_stages(schedule, 2).startswith("F2.0 F3.0 F2.1 F3.1")


def test_dualpipev_splits_backwards_only_where_the_pipeline_empties() -> None:
    schedule = build_schedule("dualpipev", num_ranks=4, num_microbatches=10)
    for rank, actions in enumerate(schedule.actions):
        split = [
            i
            for i, action in enumerate(actions)
            if action.kind == "B"
            and (i + 1 == len(actions) or actions[i + 1] != Action("W", *_at(action)))
        ]
        assert len(split) >= rank
        last_forward = max(i for i, action in enumerate(actions) if action.kind == "F")
        assert all(i > last_forward for i in split)


def _at(action: Action) -> tuple[int, int]:
    return action.stage, action.micro_batch


@pytest.mark.parametrize("name", list(SCHEDULES))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_tables_are_legal_and_keep_what_they_may(name: str, data: st.DataObject) -> None:
    p = data.draw(st.integers(1, 16), "ranks")
    p += p % 2 if name == "chimera" else 0
    step = step_of(name, p)
    m = step * data.draw(st.integers(1, 64 // step), "groups of micro-batches")
    check(name, p, m, data.draw(st.integers(2, 4), "stages a rank"))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_few_micro_batches_and_few_ranks(name: str) -> None:
    for p, m, v in sizes(name):
        if p < 5 and m < 8 and v < 4:
            check(name, p, m, v)


@pytest.mark.every
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_size(name: str) -> None:
    for p, m, v in sizes(name):
        check(name, p, m, v)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 9), (7, 7)])
def test_rank_by_rank_memory_of_1f1b(name: str, p: int, m: int) -> None:
    """Worker i of ZB-H1 keeps (p - i + 1) M_B and (i - 1) M_W, p in all (arXiv:2401.10241)."""
    report = check(name, p, m, 1)
    assert report.peak_activations == tuple(min(p - rank, m) for rank in range(p))
    if name == "zb-h1":
        assert report.peak_until_weights == (min(p, m),) * p


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_b24_fewer_micro_batches_than_stages(name: str, m: int) -> None:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=m)
    verify(schedule)
    for rank, actions in enumerate(schedule.actions):
        for kind in schedule.kinds:
            for _, stage in schedule.held_by(rank):
                done = [a.micro_batch for a in actions if (a.kind, a.stage) == (kind, stage)]
                assert done == list(range(m)), (rank, kind, stage)


def test_b24_sizes_that_cannot_be_are_refused_with_both_numbers() -> None:
    with pytest.raises(ScheduleError, match=r"micro-batches that 4 ranks divide, got 6"):
        build_schedule("interleaved", num_ranks=4, num_microbatches=6, virtual=2)
    with pytest.raises(ScheduleError, match=r"even number of micro-batches.*got 5"):
        build_schedule("chimera", num_ranks=4, num_microbatches=5)
    with pytest.raises(ScheduleError, match=r"even number of ranks, got 3"):
        build_schedule("chimera", num_ranks=3, num_microbatches=4)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_one_stage_sends_nothing_and_starts_with_its_own_forward(name: str) -> None:
    schedule = build_schedule(name, num_stages=1, num_microbatches=2)
    assert verify(schedule)
    assert schedule.actions[0][0] == Action("F", 0, 0)
    assert schedule.placements == ((0,),)


@settings(max_examples=20, deadline=None)
@given(p=st.integers(1, 8), m=st.integers(1, 16))
def test_forward_only_is_legal_and_keeps_nothing(p: int, m: int) -> None:
    schedule = forward_only(range(p), m)
    assert verify(schedule).peak_activations == (0,) * p
    assert sum(map(len, schedule.actions)) == p * m


def test_stages_ranks_and_stages_a_rank_must_agree() -> None:
    by_stages = build_schedule("zbv", num_stages=8, num_microbatches=4)
    assert by_stages == build_schedule("zbv", num_ranks=4, num_microbatches=4)
    assert by_stages == build_schedule(
        "zbv", num_stages=8, num_ranks=4, virtual=2, num_microbatches=4
    )
    assert chunks_a_rank("interleaved", 3) == 3
    with pytest.raises(ScheduleError, match="'zbv' has 2 stages a rank, not 1"):
        build_schedule("zbv", num_stages=4, num_ranks=4, num_microbatches=4)
    with pytest.raises(ScheduleError, match="'zbv' has 2 stages a rank, got 5 stages"):
        build_schedule("zbv", num_stages=5, num_microbatches=4)
    with pytest.raises(ScheduleError, match="'1f1b' has 1 stages a rank, not 2"):
        build_schedule("1f1b", num_ranks=2, num_microbatches=4, virtual=2)
    with pytest.raises(ScheduleError, match=r"how many stages a rank holds \(--virtual"):
        build_schedule("interleaved", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="at least 2 stages a rank, got 1"):
        build_schedule("interleaved", num_ranks=2, num_microbatches=4, virtual=1)


@pytest.mark.parametrize("scale", [1e-9, 3e-7, 0.1, 1e9])
def test_a_table_depends_on_relative_times_alone(scale: float) -> None:
    one, other, unlike = (
        build_schedule("chimera", num_ranks=8, num_microbatches=16, times=times)
        for times in (Times(), Times(scale, 2 * scale, scale), Times(1, 1, 0.5))
    )
    assert one == other != unlike


def test_times_far_apart_are_arranged_and_none_is_nothing() -> None:
    assert in_ticks({"F": 0.1, "B": 0.3}) == {"F": 1, "B": 3}
    assert in_ticks({"F": 1e-9, "B": 3}) == {"F": 1, "B": 10**6}
    with pytest.raises(ValueError, match="duration of F must be above 0, got 0"):
        in_ticks({"F": 0, "B": 1})


@pytest.mark.parametrize("live", [-3, 0, 1])
def test_chimera_needs_room_for_both_its_parts(live: int) -> None:
    durations = Times().durations(split_backward=False)
    with pytest.raises(ScheduleError, match=f"room for 2 micro-batches, .* got {live}"):
        chimera(4, 8, durations=durations, live=live)


def plan_of(name: str) -> SchedulePlan:
    virtual = 2 if name == "interleaved" else None
    return SchedulePlan.of(name, num_ranks=4, num_microbatches=112, virtual=virtual)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_same_table_is_made_and_verified_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice, the grid and the trainer of a run ask for it one after the other."""
    verified: list[str] = []
    monkeypatch.setattr(schedules, "verify", lambda table: verified.append(table.name))
    assert plan_of(name).sample is plan_of(name).training(112)
    assert verified == [name]


def test_a_named_table_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = replace(one_f_one_b(4, 2), num_microbatches=3, directions=(0, 0, 0))
    family = Family(lambda p, m, v, times: faulty)
    monkeypatch.setattr(schedules, "SCHEDULES", {"faulty": family})
    with pytest.raises(ScheduleError, match=r"B\(stage 0, micro-batch 2\) is missing"):
        plan_of("faulty")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"'2f2b'.*gpipe, 1f1b, interleaved"):
        build_schedule("2f2b", num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(("p", "m"), [(0, 1), (1, 0), (2, -1)])
def test_sizes_below_one_are_refused(p: int, m: int) -> None:
    with pytest.raises(ScheduleError, match=f"got {p} stages and {m} micro-batches"):
        build_schedule("1f1b", num_stages=p, num_microbatches=m)
    with pytest.raises(ScheduleError, match=f"got {p} stages and {m} micro-batches"):
        forward_only(range(p), m)
