"""Exchanges of ranks through a store, and clocks that are compared so; ranks are threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_lite.health.preflight.clocks import Skew, clock_skews
from megatron_lite.health.preflight.exchange import Exchange


@pytest.fixture
def ranks() -> Iterator[list[Exchange]]:
    """Three, each with a connection of its own, as processes have."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    whole = dist.PrefixStore("test", store)
    yield [Exchange(whole.clone(), rank=rank, world_size=3) for rank in range(3)]


def test_what_is_told_and_by_whom(ranks: list[Exchange]) -> None:
    ranks[0].tell("facts", {"a": [1]})
    ranks[2].tell("facts", "old")
    ranks[2].tell("facts", None)
    assert ranks[0].told("facts", limit=0.0) == {0: {"a": [1]}, 2: None}
    assert ranks[0].told("facts", limit=0.1, ranks=[1]) == {}
    assert ranks[1].told("facts", limit=5.0, ranks=[2]) == {2: None}
    with pytest.raises(TimeoutError, match=r"rank 0 gave no answer within 0\.1 s"):
        ranks[1].answered("plan", limit=0.1)
    ranks[0].answer("plan", "go")
    assert ranks[1].answered("plan", limit=5.0) == ranks[2].answered("plan", limit=5.0) == "go"


def test_a_thread_can_speak_while_its_rank_waits(ranks: list[Exchange]) -> None:
    beside = ranks[1].beside()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[1].answered, "plan", limit=10.0)
        beside.tell("at", "world")
        assert ranks[0].told("at", limit=5.0, ranks=[1]) == {1: "world"}
        ranks[0].answer("plan", 1)
        assert waiting.result() == 1


def test_clocks_are_compared_with_rank_0s(ranks: list[Exchange]) -> None:
    ahead = iter(range(1000, 2000))  # a second passes between two looks at it

    def compare(exchange: Exchange) -> dict[int, Skew]:
        clock = {0: lambda: 100.5, 1: lambda: 100.0, 2: lambda: float(next(ahead))}
        return clock_skews(exchange, [1, 2], limit=10.0, patience=10.0, clock=clock[exchange.rank])

    with ThreadPoolExecutor(3) as pool:
        found, *others = pool.map(compare, ranks)
    assert found == {1: Skew(-0.5, 0.0), 2: Skew(900.0, 0.5)} and others == [{}, {}]
    assert found[2].at_least == 899.5


def test_a_silent_rank_costs_the_others_their_comparison_and_no_more(ranks: list[Exchange]) -> None:
    """Rank 1 never comes; rank 0 gives up on both at once, rank 2 on rank 0."""

    def compare(exchange: Exchange) -> dict[int, Skew]:
        return clock_skews(exchange, [1, 2], limit=0.5, patience=0.2)

    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(compare, (ranks[0], ranks[2]))) == [{}, {}]
    assert 0.5 <= time.monotonic() - started < 5.0
