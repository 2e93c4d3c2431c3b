"""Idle time and memory of the tables, simulated, beside the published formulas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.chimera import chimera
from megatron_lite.pipeline.messages import supplier
from megatron_lite.pipeline.published import PUBLISHED
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule
from megatron_lite.pipeline.simulate import Times, simulate, simulate_shares
from megatron_lite.pipeline.verify import verify

EQUAL_PARTS = Times(forward=10, backward=20, weight=10)
SIZES = [(2, 4), (4, 8), (4, 16), (6, 12), (8, 16)]
TIMES = [EQUAL_PARTS, Times(10, 21, 9), Times(10, 25, 10), Times(20, 26, 6)]


def table(name: str, p: int, m: int, times: Times, v: int = 2) -> Schedule:
    chosen = v if SCHEDULES[name].chunks is None else None
    return build_schedule(name, num_ranks=p, num_microbatches=m, virtual=chosen, times=times)


def bubble(schedule: Schedule, times: Times) -> float:
    chunks = len(schedule.held_by(0)) // len(schedule.placements)
    durations = times.durations(split_backward=schedule.split_backward, chunks=chunks)
    return simulate(schedule, durations=durations).bubble_fraction


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("times", TIMES)
def test_closed_forms_hold_at_all_times(name: str, times: Times) -> None:
    for p, m in SIZES:
        found = bubble(table(name, p, m, times), times)
        assert found == pytest.approx(PUBLISHED[name].bubble(p, m, 1, times), abs=1e-12), (p, m)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved(v: int) -> None:
    """Over ideal (p - 1) / (v m); the first rank keeps 1 + (p - 1) / (p v) of 1F1B's."""
    for p, m in SIZES:
        schedule = table("interleaved", p, m, EQUAL_PARTS, v)
        found = bubble(schedule, EQUAL_PARTS)
        assert found / (1 - found) == pytest.approx((p - 1) / (v * m))
        live = verify(schedule).peak_activations
        assert live[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))
        assert max(live) == live[0]


@pytest.mark.parametrize("m", [4, 6, 8, 10, 12, 16, 24, 32])
def test_chimera_at_equal_times(m: int) -> None:
    """(p - 2) / (2 m + p - 2) idle, between p / 2 + 1 and p alive, for every even m >= p."""
    times = Times(forward=10, backward=10, weight=5)
    for p in (2, 4, 6, 8):
        if m < p:
            continue
        schedule = table("chimera", p, m, times)
        assert bubble(schedule, times) == pytest.approx((p - 2) / (2 * m + p - 2), abs=1e-12)
        assert all(p / 2 + 1 <= live <= p for live in verify(schedule).peak_activations)


@pytest.mark.parametrize(("p", "m", "step"), [(4, 8, 28), (4, 16, 52), (8, 32, 108)])
def test_chimera_beats_1f1b_where_a_backward_takes_two_forwards(p: int, m: int, step: int) -> None:
    schedule = table("chimera", p, m, EQUAL_PARTS)
    assert bubble(schedule, EQUAL_PARTS) == pytest.approx(1 - 3 * m / step)
    assert bubble(schedule, EQUAL_PARTS) < bubble(table("1f1b", p, m, EQUAL_PARTS), EQUAL_PARTS)
    assert max(verify(schedule).peak_activations) <= p


@pytest.mark.parametrize(("p", "m", "step"), [(4, 16, 64), (8, 16, 72), (8, 32, 144)])
def test_chimera_units_one_behind_the_other_do_not(p: int, m: int, step: int) -> None:
    """Why the tables are arranged anew for every number of micro-batches."""
    unit = table("chimera", p, p, Times(10, 10, 5))
    rows = tuple(
        tuple(
            replace(action, micro_batch=action.micro_batch + first)
            for first in range(0, m, p)
            for action in row
        )
        for row in unit.actions
    )
    joined = replace(unit, num_microbatches=m, directions=(0, 1) * (m // 2), actions=rows)
    assert bubble(joined, EQUAL_PARTS) == pytest.approx(1 - 3 * m / step)
    assert bubble(joined, EQUAL_PARTS) > bubble(table("1f1b", p, m, EQUAL_PARTS), EQUAL_PARTS)


def test_more_memory_brings_chimera_to_the_formula_for_equal_times() -> None:
    """At 8 ranks and 32 micro-batches, in forwards' time; the README names the figures."""
    durations = EQUAL_PARTS.durations(split_backward=False)
    steps = {
        live: simulate(chimera(8, 32, durations=durations, live=live), durations=durations).makespan
        for live in range(8, 33)
    }
    assert {steps[live] for live in range(8, 27)} == {1080}
    assert [steps[live] for live in range(27, 33)] == [1070, 1070, 1060, 1060, 1050, 1050]
    formula = PUBLISHED["chimera"].bubble(8, 32, 1, EQUAL_PARTS)
    assert formula == pytest.approx(1 - 32 * 30 / 1050)
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert "27 alive make it 107, 29 make it 106, and 31 (`--live 31`) the formula's 105" in readme


def test_zbv_is_idle_in_the_first_and_last_slots_only() -> None:
    """(p - 1) / (p - 1 + 6 m) at F = B = W, with the memory of 1F1B until W."""
    for p, m in [*SIZES, (3, 6), (5, 16), (8, 32)]:
        schedule = table("zbv", p, m, EQUAL_PARTS)
        assert bubble(schedule, EQUAL_PARTS) == pytest.approx((p - 1) / (p - 1 + 6 * m), abs=1e-12)
        assert max(verify(schedule).peak_until_weights) == 2 * p


@pytest.mark.parametrize("times", TIMES)
def test_zbv_is_less_idle_than_zb_h1_at_all_times(times: Times) -> None:
    for p, m in SIZES:
        zbv, zb_h1 = (bubble(table(name, p, m, times), times) for name in ("zbv", "zb-h1"))
        assert zbv < zb_h1


@pytest.mark.parametrize("times", TIMES)
def test_dualpipev_is_below_the_formula(times: Times) -> None:
    """A forward of ours is sent on before the backward that it is paired with begins.

    Were both results of a pair handed over at its end, the formula would hold at F = B = W.
    """
    for p, m in SIZES:
        schedule = table("dualpipev", p, m, times)
        formula = PUBLISHED["dualpipev"].idle(p, m, 2, times)
        paired = idle_in_pairs(schedule, times)
        if times == EQUAL_PARTS:
            assert formula == paired == pytest.approx(2 * idle(schedule, times))
        else:
            assert formula > paired > idle(schedule, times)
        assert max(verify(schedule).peak_activations) == 2 * p + 1


def idle(schedule: Schedule, times: Times) -> float:
    """A rank's idle time in a step."""
    timeline = simulate_shares(schedule, times)
    return timeline.bubble_fraction * timeline.makespan


def idle_in_pairs(schedule: Schedule, times: Times) -> float:
    """A rank's, where a forward and the other stage's backward behind it are one piece of work."""
    durations = times.durations(split_backward=True, chunks=2)
    blocks = [deque(pairs(row)) for row in schedule.actions]
    free, ends = [0.0] * schedule.num_ranks, dict[Action, float]()
    while any(blocks):
        before = len(ends)
        for rank, row in enumerate(blocks):
            while row and all(giver in ends for giver in inputs(schedule, row[0])):
                block = row.popleft()
                start = max(free[rank], *(ends[giver] for giver in inputs(schedule, block)), 0.0)
                free[rank] = start + sum(durations[action.kind] for action in block)
                ends |= dict.fromkeys(block, free[rank])
        assert len(ends) > before, "deadlock"
    return max(free) - schedule.num_microbatches * (times.forward + times.backward)


def pairs(row: Sequence[Action]) -> Iterator[list[Action]]:
    """The row in blocks: F and the other stage's B, with its W right behind it, or one action."""
    left = deque(row)
    while left:
        block = [left.popleft()]
        behind = left[0] if left else block[0]
        if block[0].kind == "F" and behind.kind == "B" and behind.stage != block[0].stage:
            block.append(left.popleft())
            if left and left[0] == replace(behind, kind="W"):
                block.append(left.popleft())
        yield block


def inputs(schedule: Schedule, block: list[Action]) -> list[Action]:
    """What a block takes in from other ranks and from the other stage."""
    givers = (supplier(schedule, action) for action in block)
    return [giver for giver in givers if giver is not None and giver not in block]


def test_dualpipev_at_equal_parts_has_the_idle_time_of_zbv() -> None:
    for p, m in SIZES:
        schedules = [table(name, p, m, EQUAL_PARTS) for name in ("dualpipev", "zbv")]
        assert len({round(bubble(schedule, EQUAL_PARTS), 12) for schedule in schedules}) == 1


@pytest.mark.every
def test_formulas_that_hold_exactly_hold_for_every_size() -> None:
    equal = Times(10, 10, 5)
    for p in range(1, 17):
        for m in range(1, 65):
            if m >= p:
                found = bubble(table("zb-h1", p, m, EQUAL_PARTS), EQUAL_PARTS)
                assert found == pytest.approx(PUBLISHED["zb-h1"].bubble(p, m, 1, EQUAL_PARTS))
            if m >= 2 * p:
                found = bubble(table("zbv", p, m, EQUAL_PARTS), EQUAL_PARTS)
                assert found == pytest.approx(PUBLISHED["zbv"].bubble(p, m, 2, EQUAL_PARTS))
            if m >= p and m % 2 == p % 2 == 0:
                found = bubble(table("chimera", p, m, equal), equal)
                assert found == pytest.approx(PUBLISHED["chimera"].bubble(p, m, 1, equal))
                found = bubble(table("chimera", p, m, EQUAL_PARTS), EQUAL_PARTS)
                assert found < PUBLISHED["1f1b"].bubble(p, m, 1, EQUAL_PARTS)
