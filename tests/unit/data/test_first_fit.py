"""First-fit packing loses nothing, repeats nothing and keeps packs within their size."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.first_fit import FirstFit


def packs(sizes: list[int], capacity: int, open_packs: int) -> list[list[int]]:
    """The numbers of the items in each pack."""
    packing: FirstFit[int] = FirstFit(capacity, open_packs=open_packs)
    given_out = [packing.add(number, size) for number, size in enumerate(sizes)]
    return [*filter(None, given_out), *packing.rest()]


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 8))
def test_every_item_is_in_one_pack(sizes: list[int], open_packs: int) -> None:
    found = packs(sizes, 20, open_packs)
    assert sorted(chain(*found)) == list(range(len(sizes)))
    for pack in found:
        assert pack == sorted(pack)
        assert sum(sizes[number] for number in pack) <= 20
    assert [pack[0] for pack in found] == sorted(pack[0] for pack in found)


def test_an_item_goes_to_the_oldest_pack_with_room() -> None:
    assert packs([6, 7, 3, 4, 2], 10, 9) == [[0, 2], [1, 4], [3]]


def test_the_oldest_pack_makes_room() -> None:
    assert packs([9, 8, 9, 1, 1], 10, 2) == [[0], [1, 3, 4], [2]]
    assert packs([9, 8, 9, 1, 2], 10, 1) == [[0], [1], [2, 3], [4]]
    with pytest.raises(ValueError, match="size 11 in packs of 10"):
        packs([11], 10, 1)


def test_little_stays_empty() -> None:
    """Lengths of a skewed distribution, as conversations have them."""
    sizes = np.random.default_rng(1).exponential(300, 20_000).clip(10, 2049).astype(int).tolist()
    assert len(packs(sizes, 2049, 128)) * 2049 < 1.02 * sum(sizes)
