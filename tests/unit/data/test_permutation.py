"""The keyed bijection behind every shuffled order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.permutation import KeyedPermutation


def _order(size: int, *key: int | str) -> list[int]:
    return [KeyedPermutation(size, *key)(index) for index in range(size)]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 70), seed=st.integers(0, 2**63))
def test_it_is_a_bijection(size: int, seed: int) -> None:
    assert sorted(_order(size, seed, "windows", 3)) == list(range(size))


def test_orders_never_change() -> None:
    """Runs are resumed on other machines and library versions: the order is part of the format."""
    assert _order(10, 1234, "documents", 0) == [9, 5, 1, 4, 7, 0, 3, 2, 8, 6]


def test_keys_differ() -> None:
    orders = {
        tuple(_order(16, seed, name, epoch))
        for seed in range(4)
        for name in ("documents", "windows")
        for epoch in range(4)
    }
    assert len(orders) == 32


def test_places_are_evenly_likely() -> None:
    """Over many keys, each element comes first about equally often."""
    firsts = [KeyedPermutation(8, seed)(0) for seed in range(4000)]
    counts = [firsts.count(value) for value in range(8)]
    assert max(abs(count - 500) for count in counts) < 110  # 5 standard deviations of 21


def test_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="size 0"):
        KeyedPermutation(0, 1)
    for index in (-1, 5):
        with pytest.raises(IndexError):
            KeyedPermutation(5, 1)(index)
