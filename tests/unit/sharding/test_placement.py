"""Placements: every element of a logical tensor is held, counted once, and found where it lies."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.sharding.placement import (
    Box,
    Placement,
    flat_range_boxes,
    replicated,
    sharded,
    stacked,
)

SIZES = st.sampled_from([1, 2, 3, 4, 8])


def flat_positions(shape: tuple[int, ...], box: Box) -> list[int]:
    """The flat positions of a box's elements in an array of `shape`, in the box's own order."""
    return list(np.arange(prod(shape)).reshape(shape)[box.slices()].ravel())


def local_array(placement: Placement) -> np.ndarray:
    """What the local parameter holds of logical tensors whose elements are their flat positions;
    -1 where it holds padding. Made from segments alone."""
    rows = np.full(placement.shape, -1)
    for segment in placement.segments:
        whole = np.arange(prod(segment.shape)).reshape(segment.shape)
        rows[segment.row : segment.row + segment.box.size[0]] = whole[segment.box.slices()]
    return rows


@st.composite
def group_of_placements(draw: st.DrawFn) -> list[Placement]:
    """The placements of one fused, cut or copied parameter on every rank of a tensor group."""
    size = draw(SIZES)
    tail = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    kind = draw(st.sampled_from(["replicated", "rows", "padded", "columns", "stacked"]))
    length = size * draw(st.integers(1, 4))
    if kind == "columns":
        shape = (draw(st.integers(1, 4)), length, *tail[:1])
        return [sharded("a", shape, dim=1, rank=r, size=size) for r in range(size)]
    if kind == "replicated":
        return [replicated("a", (length, *tail), rank=r) for r in range(size)]
    if kind == "padded":
        true = draw(st.integers(1, length))
        return [
            sharded("a", (true, *tail), dim=0, rank=r, size=size, padded=length)
            for r in range(size)
        ]
    names = ["a", "b", "c"][: 1 if kind == "rows" else draw(st.integers(2, 3))]
    lengths = {name: size * draw(st.integers(1, 4)) for name in names}
    return [
        stacked(*(sharded(n, (m, *tail), dim=0, rank=r, size=size) for n, m in lengths.items()))
        for r in range(size)
    ]


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape of one to three dims and a range inside it, possibly empty."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@settings(deadline=None)
@given(flat_ranges())
def test_boxes_of_a_flat_range_are_it_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = list(flat_range_boxes(shape, start, stop))
    positions = [p for box in boxes for p in flat_positions(shape, box)]
    assert positions == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1
    assert all(box.numel > 0 for box in boxes)


@settings(deadline=None)
@given(group_of_placements(), st.data())
def test_pieces_of_a_flat_range_are_what_lies_there(
    group: list[Placement], data: st.DataObject
) -> None:
    placement = data.draw(st.sampled_from(group))
    local = local_array(placement).ravel()
    start = data.draw(st.integers(0, local.size))
    stop = data.draw(st.integers(start, local.size))
    found = np.full(local.size, -1)
    end = start
    for piece in placement.pieces(start, stop):
        assert piece.start >= end, "pieces overlap or are out of order"
        end = piece.start + piece.box.numel
        assert end <= stop
        found[piece.start : end] = flat_positions(piece.shape, piece.box)
    expected = np.full(local.size, -1)
    expected[start:stop] = local[start:stop]
    np.testing.assert_array_equal(found, expected)


@settings(deadline=None)
@given(group_of_placements())
def test_every_element_has_one_counted_holder(group: list[Placement]) -> None:
    counted: Counter[tuple[str, int]] = Counter()
    shapes = {}
    for placement in group:
        for piece in placement.pieces():
            shapes[piece.tensor] = piece.shape
            if placement.counted:
                counted.update((piece.tensor, p) for p in flat_positions(piece.shape, piece.box))
    elements = {(name, p) for name, shape in shapes.items() for p in range(prod(shape))}
    assert set(counted) == elements
    assert set(counted.values()) == {1}


@settings(deadline=None)
@given(group_of_placements())
def test_shards_of_a_group_have_one_shape(group: list[Placement]) -> None:
    assert len({placement.shape for placement in group}) == 1
    for placement in group:
        differs = placement.segments != group[0].segments
        assert placement.tensor_sharded or not differs, "different elements, marked as copies"


def test_pieces_name_their_tensor() -> None:
    fused = stacked(
        sharded("q", (4, 2), dim=0, rank=1, size=2), sharded("k", (2, 2), dim=0, rank=1, size=2)
    )
    assert fused.names == ("q", "k")
    pieces = list(fused.pieces(1, 6))
    assert [(p.tensor, p.shape, p.box.offset, p.box.size, p.start) for p in pieces] == [
        ("q", (4, 2), (2, 1), (1, 1), 1),
        ("q", (4, 2), (3, 0), (1, 2), 2),
        ("k", (2, 2), (1, 0), (1, 2), 4),
    ]


def test_stacks_can_be_stacked() -> None:
    a, b, c = (sharded(name, (4,), dim=0, rank=0, size=2) for name in "abc")
    assert stacked(stacked(a, b), c) == stacked(a, stacked(b, c)) == stacked(a, b, c)
    assert [(s.tensor, s.row) for s in stacked(a, stacked(b, c)).segments] == [
        ("a", 0),
        ("b", 2),
        ("c", 4),
    ]


def test_a_rank_of_nothing_but_padding_has_no_piece() -> None:
    last = sharded("table", (33, 4), dim=0, rank=3, size=4, padded=48)
    assert last.shape == (12, 4)
    assert list(last.pieces()) == []


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="weight: dimension 1 of length 6"):
        sharded("weight", (4, 6), dim=1, rank=0, size=4)


BOXES = st.tuples(st.integers(0, 4), st.integers(1, 4))


@settings(deadline=None)
@given(st.lists(st.tuples(BOXES, BOXES), min_size=1, max_size=3))
def test_intersection_is_the_common_elements(
    dims: list[tuple[tuple[int, int], tuple[int, int]]],
) -> None:
    a, b = (Box(tuple(d[i][0] for d in dims), tuple(d[i][1] for d in dims)) for i in (0, 1))
    shape = (8,) * len(dims)
    common = set(flat_positions(shape, a)) & set(flat_positions(shape, b))
    met = a.intersect(b)
    assert (set() if met is None else set(flat_positions(shape, met))) == common


def test_slices_are_relative_to_an_origin() -> None:
    box = Box((3, 5), (2, 1))
    assert box.slices() == (slice(3, 5), slice(5, 6))
    assert box.slices((2, 5)) == (slice(1, 3), slice(0, 1))
