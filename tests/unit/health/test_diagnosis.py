"""Which rank is named, on made-up observations of a run with tensor 2 x pipeline 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_lite.health.diagnosis import describe, diagnose
from megatron_lite.health.observation import Observation, Seen
from megatron_lite.health.record import Facts, Position, Pulse, Record

STILL = 100.0
WHERE = Position(iteration=5, phase="forward-backward", doing="F(stage 0, micro-batch 1)")


def rank(
    number: int,
    *,
    waits_for: int | None = None,
    world: int = 9,
    tensor: int = 9,
    still: float = STILL,
    beats: bool = True,
    state: str | None = "S",
    **position: Any,
) -> Seen:
    """One rank of the run, tensor-parallel with its neighbour; by default it waits in the same
    collective as the others."""
    groups = {"world": 0, "tensor": number // 2 * 2}
    facts = Facts(
        rank=number, world_size=4, host="h", node=f"node-{number}", pid=40 + number, groups=groups
    )
    pulse = Pulse(still=still, collectives=(world, tensor, 0, 0, 0, 0))
    where = replace(WHERE, waits_for=waits_for, **position)
    return Seen(Record(facts, where, pulse), beats, state)


def of(*ranks: Seen) -> Observation:
    return Observation(4, {one.record.facts.rank: one for one in ranks})


ALL = [rank(0), rank(1), rank(2), rank(3)]


@pytest.mark.parametrize(
    ("seen", "named", "why"),
    [
        pytest.param(of(*[rank(r, still=1) for r in range(4)]), [], "no rank lags", id="well"),
        pytest.param(
            of(rank(0, still=1), rank(1), rank(2, waits_for=1), rank(3)),
            [],
            "no rank lags",
            id="one-moves",
        ),
        pytest.param(
            of(
                rank(0, still=1), rank(1, still=1), rank(2, still=1, state="T", beats=False), ALL[3]
            ),
            [2],
            "its process is stopped",
            id="stopped-just-now",
        ),
        pytest.param(
            of(ALL[0], rank(1, state="", beats=False), *ALL[2:]), [1], "is gone", id="gone"
        ),
        pytest.param(
            of(*ALL[:3], rank(3, state=None, beats=False)),
            [3],
            "its heartbeat stopped",
            id="frozen-elsewhere",
        ),
        pytest.param(
            of(*ALL[:3], rank(3, state="D", beats=False)), [3], "state D", id="waits-for-a-disk"
        ),
        pytest.param(
            of(rank(0, waits_for=2), rank(1, tensor=10), rank(2, tensor=8), rank(3)),
            [2],
            "the others wait for it",
            id="a-chain-of-message-and-collective",
        ),
        pytest.param(
            of(rank(0, world=10), rank(1, world=10), rank(2, world=10), rank(3)),
            [3],
            "the others wait for it",
            id="behind-in-a-collective",
        ),
        pytest.param(
            of(rank(0, tensor=10), rank(1, waits_for=3), rank(2), rank(3, waits_for=1)),
            [1, 3],
            "wait for it",
            id="a-deadlock-of-messages",
        ),
        pytest.param(
            of(rank(0, tensor=10), rank(1, waits_for=0), rank(2), rank(3)),
            [0],
            "wait for it",
            id="a-circle-with-a-collective-begun-ahead",
        ),
        pytest.param(
            of(rank(0, iteration=6), rank(1, phase="waiting for data"), ALL[2], ALL[3]),
            [1],
            "behind the others",
            id="no-edges-but-an-earlier-phase",
        ),
        pytest.param(of(*ALL), [], "no rank is behind: all 4 are in forward", id="all-equal"),
        pytest.param(of(*ALL[:3]), [3], "has left no heartbeat", id="never-started"),
        pytest.param(
            of(*[rank(r, still=1) for r in range(3)]), [], "no rank lags", id="still-coming-up"
        ),
        pytest.param(
            of(*[rank(r, beats=False, tensor=9 - (r == 1)) for r in range(4)]),
            [1],
            "the others wait for it",
            id="all-hang-in-c-code",
        ),
        pytest.param(
            of(*[rank(r, beats=False, state="T" if r == 1 else "S") for r in range(4)]),
            [1],
            "is stopped",
            id="all-silent-and-one-stopped",
        ),
        pytest.param(
            of(*[rank(r, beats=False, state="T") for r in range(4)]),
            [0, 1, 2, 3],
            "is stopped",
            id="all-stopped",
        ),
        pytest.param(
            of(*[rank(r, beats=False, state="") for r in range(4)]),
            [],
            "all processes are gone",
            id="killed",
        ),
        pytest.param(
            of(*[rank(r, beats=False, state="", phase="ended") for r in range(4)]),
            [],
            "no rank lags",
            id="done",
        ),
    ],
)
def test_who_is_named(seen: Observation, named: list[int], why: str) -> None:
    found = diagnose(seen, moves_within=30)
    assert [lag.rank for lag in found.lagging] == named
    told = describe(found, seen)
    assert len(told) == max(1, len(named)) and all(why in line for line in told)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (rank(0), "nothing moves"),
        (rank(0, beats=False), "its heartbeat stopped"),
        (rank(0, beats=False, state="T"), "is stopped"),
    ],
)
def test_a_run_of_one_rank(one: Seen, why: str) -> None:
    seen = Observation(1, {0: one})
    (told,) = describe(diagnose(seen), seen)
    assert told.startswith("rank 0 on node-0") and why in told


def test_many_are_told_in_short() -> None:
    seen = Observation(100, {r: rank(r, beats=False, state="T") for r in range(100)})
    told = describe(diagnose(seen), seen)
    assert len(told) == 9 and told[-1] == "so do ranks 8-99"


def test_the_sentence_names_rank_node_phase_and_who_waits() -> None:
    seen = of(rank(0, waits_for=2), rank(1, tensor=10), rank(2, state="T", beats=False), rank(3))
    (told,) = describe(diagnose(seen), seen)
    assert told.startswith("rank 2 on node-2 (process 42) lags: its process is stopped")
    assert "in forward-backward of iteration 5: F(stage 0, micro-batch 1)" in told
    assert told.endswith("; ranks 0-1 wait for it")
    seen = of(*ALL[:3], rank(3, state="T", beats=False, waits_for=1))
    (told,) = describe(diagnose(seen), seen)
    assert told.endswith("F(stage 0, micro-batch 1), for which rank 1 must send a message")
