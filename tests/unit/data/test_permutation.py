"""The keyed bijection behind every shuffled order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.permutation import KeyedPermutation


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 70), seed=st.integers(0, 2**63))
def test_it_is_a_bijection_and_both_forms_agree(size: int, seed: int) -> None:
    permutation = KeyedPermutation(size, seed, "windows", 3)
    order = permutation.all().tolist()
    assert sorted(order) == list(range(size))
    assert [permutation(index) for index in range(size)] == order


def test_blocks_join() -> None:
    size = (1 << 15) + 10  # more than one block of the vectorised form
    permutation = KeyedPermutation(size, 1)
    order = permutation.all()
    assert len(set(order.tolist())) == size
    assert order[-3:].tolist() == [permutation(size - 3 + index) for index in range(3)]


def test_orders_never_change() -> None:
    """Runs are resumed on other machines and library versions: the order is part of the format."""
    assert KeyedPermutation(10, 1234, "documents", 0).all().tolist() == [
        9,
        5,
        1,
        4,
        7,
        0,
        3,
        2,
        8,
        6,
    ]


def test_keys_differ() -> None:
    orders = {
        tuple(KeyedPermutation(16, seed, name, epoch).all())
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
