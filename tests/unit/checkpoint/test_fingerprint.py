"""A fingerprint is the same however a tensor is cut, and another one for any other tensor."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.checkpoint.fingerprint import Fingerprints, box_fingerprint
from megatron_lite.sharding.placement import Box


def whole(values: np.ndarray) -> int:
    """The fingerprint of an uncut tensor."""
    return box_fingerprint(values, Box((0,) * values.ndim, values.shape))


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[np.ndarray, list[Box]]:
    """A random array of up to three dims, and boxes that hold each element once."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    values = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape, np.float32)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if box.size[dim] == 1:
            boxes.append(box)
            continue
        at = draw(st.integers(1, box.size[dim] - 1))
        low, high = list(box.size), list(box.size)
        low[dim], high[dim] = at, box.size[dim] - at
        moved = tuple(o + at * (d == dim) for d, o in enumerate(box.offset))
        boxes += [Box(box.offset, tuple(low)), Box(moved, tuple(high))]
    return values, boxes


@given(cut_arrays())
@settings(max_examples=100, deadline=None)
def test_any_cut_gives_the_same_sum(case: tuple[np.ndarray, list[Box]]) -> None:
    values, boxes = case
    parts = [box_fingerprint(values[box.slices()], box) for box in boxes]
    assert sum(parts) % 2**64 == whole(values)


def test_what_it_is_the_sum_of() -> None:
    """Against Python's own integers."""
    values = np.random.default_rng(1).standard_normal((3, 5), np.float32)
    unit = np.zeros((3, 5), np.float32)
    weights = np.empty((3, 5), object)
    for place in np.ndindex(3, 5):
        one = unit.copy()
        one.view(np.uint32)[place] = 1
        weights[place] = whole(one)
    bits = values.view(np.uint32)
    expected = sum(int(bits[p]) * weights[p] for p in np.ndindex(3, 5)) % 2**64
    assert whole(values) == expected
    assert len(set(weights.ravel())) == 15 and all(w % 2 for w in weights.ravel())


def test_every_change_is_seen() -> None:
    values = np.random.default_rng(2).standard_normal((64, 48), np.float32)
    found = {whole(values), whole(values.T.copy()), whole(values[::-1].copy())}
    found.add(whole(np.roll(values, 1, axis=1)))
    for row, column, bit in [(0, 0, 0), (63, 47, 31), (5, 9, 13)]:
        flipped = values.copy()
        flipped.view(np.uint32)[row, column] ^= np.uint32(1 << bit)
        found.add(whole(flipped))
    swapped = values.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    found.add(whole(swapped))
    assert len(found) == 8


def test_bits_and_not_numbers_are_hashed() -> None:
    zeros = np.zeros(4, np.float32)
    assert whole(zeros) == 0 and whole(-zeros) != 0
    nan = np.array([np.nan], np.float32)
    other = nan.copy()
    other.view(np.uint32)[0] ^= np.uint32(1)
    assert np.isnan(other[0]) and whole(nan) != whole(other)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_no_warning_of_overflow(dtype: type) -> None:
    values = np.full((300, 200), 60000, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(values) == sum(
            box_fingerprint(values[i : i + 7], Box((i, 0), (min(7, 300 - i), 200)))
            for i in range(0, 300, 7)
        ) % (2**64)
        assert box_fingerprint(np.array(3.0, dtype), Box((), ())) > 0


def test_a_table_of_them() -> None:
    one, other = Fingerprints(), Fingerprints()
    for table in (one, other):
        table.add("b", "fp32", 1)
        table.add("a", "fp32", 2**64 - 1)
        table.add("a", "fp32", 3)
    assert one.lines() == ["0000000000000002 a fp32", "0000000000000001 b fp32"]
    assert one.total() == other.total() and len(one.total()) == 32
    assert one.differing(other) == []
    other.add("b", "fp32", 1)
    other.add("c", "exp_avg", 1)
    assert one.differing(other) == [("b", "fp32"), ("c", "exp_avg")]
    assert one.total() != other.total()
