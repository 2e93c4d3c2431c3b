"""What the facts of many made-up ranks amount to, in words."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from megatron_lite.health.preflight.clocks import Skew
from megatron_lite.health.preflight.comparison import (
    Reading,
    astray,
    compare,
    judge_groups,
    places,
    spans,
    whole_groups,
)
from megatron_lite.health.preflight.facts import Facts
from megatron_lite.health.preflight.record import Record
from megatron_lite.health.preflight.verdict import SHOWN, PreflightFailed

GPUS = 4
NODES = MappingProxyType({rank: f"gpu{1 + rank // GPUS}" for rank in range(24)})
MANY = 10**12


def healthy() -> dict[int, Facts]:
    """Six nodes of four GPUs."""
    return {
        rank: Facts(
            node,
            rank % GPUS,
            must_agree={"torch": "2.13.0", "code": "ab12"},
            should_agree={"device": "H200"},
            device=f"GPU-{rank % GPUS}",  # alike on two nodes: it is told apart by its node, too
            free={"run folder": MANY},
        )
        for rank, node in NODES.items()
    }


def test_nothing_is_wrong_with_healthy_ranks() -> None:
    found = compare(healthy())
    assert (found.faults, found.warnings) == ([], [])


def test_the_few_are_told_by_rank_and_node() -> None:
    facts = healthy()
    facts[5] = replace(facts[5], must_agree=facts[5].must_agree | {"torch": "2.12.0"})
    for rank in (8, 9, 10, 11, 12):
        facts[rank] = replace(facts[rank], should_agree={"device": "H100"})
    found = compare(facts)
    assert found.faults == ["rank 5 on node gpu2: torch is 2.12.0, on the 23 others it is 2.13.0"]
    assert found.warnings == [
        "ranks 8-11 on node gpu3 and rank 12 on node gpu4: device is H100, on the 19 others it is "
        "H200"
    ]


def test_what_a_rank_has_not_is_a_difference_too() -> None:
    facts = healthy()
    facts[7] = replace(facts[7], should_agree=facts[7].should_agree | {"NCCL_ALGO": "Tree"})
    del facts[2].must_agree["code"]
    found = compare(facts)
    assert found.faults == ["rank 2 on node gpu1: code is none, on the 23 others it is ab12"]
    assert found.warnings == ["rank 7 on node gpu2: NCCL_ALGO is Tree, on the 23 others it is none"]


def test_three_values_and_two_halves() -> None:
    """Of two halves that with rank 0 is taken for the usual one."""
    facts = {rank: Facts(f"n{rank}", 0, must_agree={"torch": v}) for rank, v in enumerate("abab")}
    assert compare(facts).faults == [
        "rank 1 on node n1 and rank 3 on node n3: torch is b, on the 2 others it is a"
    ]
    facts = {rank: Facts("n", 0, must_agree={"torch": v}) for rank, v in enumerate("abac")}
    assert compare(facts).faults == [
        "rank 1 on node n: torch is b, on 2 ranks it is a",
        "rank 3 on node n: torch is c, on 2 ranks it is a",
    ]


def test_two_ranks_on_one_gpu() -> None:
    facts = healthy()
    facts[6] = replace(facts[6], device=facts[4].device, local_rank=0)
    (fault,) = compare(facts).faults
    assert fault.startswith("ranks 4, 6 on node gpu2: all use the GPU GPU-0 (local ranks 0, 0)")


def test_what_ranks_found_by_themselves_is_told_once_a_text() -> None:
    facts = healthy()
    for rank in range(4, 8):
        facts[rank] = replace(
            facts[rank], faults=["nvme is broken"], doubts=["a cache"], free={"run folder": 10**7}
        )
    found = compare(facts)
    assert found.faults == ["ranks 4-7 on node gpu2: nvme is broken"]
    assert found.warnings == [
        "ranks 4-7 on node gpu2: a cache",
        "ranks 4-7 on node gpu2: only 0.01 GB are free in run folder",
    ]


def test_places_of_many_ranks_stay_short() -> None:
    assert places([3], NODES) == "rank 3 on node gpu1"
    assert places(range(24), NODES) == (
        "ranks 0-3 on node gpu1, ranks 4-7 on node gpu2, ranks 8-11 on node gpu3, "
        "ranks 12-15 on node gpu4 and those of 2 more nodes"
    )
    assert places([99], NODES) == "rank 99 on node unknown"
    assert spans([0, 1, 2, 5, 6, 9]) == "0-2, 5, 6, 9"


def test_clocks_are_told_where_the_difference_is_certain() -> None:
    skews = {4: Skew(0.5, 0.001), 8: Skew(-310.0, 0.1), 12: Skew(3.0, 1.5), 16: Skew(4.0, 1.5)}
    assert astray(skews, NODES) == [
        "rank 8 on node gpu3: the clock is 310.0 s behind that of gpu1, rank 0's node",
        "rank 16 on node gpu5: the clock is 4.0 s ahead of that of gpu1, rank 0's node",
    ]


def readings(seconds: dict[int, float], wrong: int | None = None) -> dict[int, list[Reading]]:
    """Of all ranks: one world, and a tensor group a node with the given seconds (else 0.01)."""
    found = {}
    for rank in NODES:
        first = rank // GPUS * GPUS
        ranks, took = tuple(range(first, first + GPUS)), seconds.get(rank // GPUS, 0.01)
        found[rank] = [
            Reading("world", tuple(NODES), 0.05, 1.0, correct=True),
            Reading("tensor", ranks, took, 0.1 / took, correct=rank != wrong),
        ]
    return found


def test_a_slow_group_is_told_with_its_node() -> None:
    found = judge_groups(readings({2: 0.04, 3: 0.019}), NODES, jitter=0.001)
    assert found.faults == []
    assert found.warnings == [
        "ranks 8-11 on node gpu3: slow tensor group, 2.50 GB/s in an all-reduce, 4.0 times the "
        "median time of its like"
    ]
    chance = judge_groups(readings({2: 0.04}), NODES, jitter=0.05)
    assert chance.warnings == [], "30 ms more may be chance where ranks share cores"


def test_a_wrong_sum_is_a_fault_of_its_rank_and_group() -> None:
    found = judge_groups(readings({}, wrong=9), NODES, jitter=0.001)
    assert found.faults == [
        "rank 9 on node gpu3: the all-reduce over the tensor group of ranks 8-11 on node gpu3 gave "
        "a wrong sum"
    ]
    whole = whole_groups(one for own in readings({}, wrong=9).values() for one in own)
    assert [one.ranks[0] for one in whole if not one.correct] == [8]
    assert [one.kind for one in whole] == ["world"] + 6 * ["tensor"]


def test_an_error_names_faults_but_not_thousands() -> None:
    assert str(PreflightFailed.of(["a"])) == "preflight: a"
    assert str(PreflightFailed.of(["a", "b"])) == "preflight: 2 faults:\n  a\n  b"
    first, *faults, last = str(PreflightFailed.of(["a"] * 500)).splitlines()
    assert first == "preflight: 500 faults:" and len(faults) == SHOWN
    assert last == f"  and {500 - SHOWN} more: see preflight.json in the run folder"


def test_the_block_of_a_large_job_stays_short() -> None:
    facts = {
        rank: replace(
            fact,
            node=f"gpu{rank}",
            must_agree=dict.fromkeys(("python", "torch", "deepspeed", "code"), "1"),
            free={"run folder": MANY + rank},
        )
        for rank, fact in healthy().items()
    }
    whole = whole_groups(one for own in readings({1: 0.02}).values() for one in own)
    record = Record(facts, {4: Skew(-0.005, 0.001)}, whole, seconds=1.5)
    first, second, third = record.lines()
    assert "24 ranks on 24 nodes: gpu0, gpu1" in first and "gpu7 and 16 more | " in first
    assert "free: run folder 1000.0 GB | clocks within 4 ms |" in second
    assert "world 1.00, tensor 5.00 to 10.00 (6 groups) | 1.50 s |" in third
