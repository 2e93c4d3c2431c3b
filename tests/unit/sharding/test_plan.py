"""Every element of every tensor is in one shard of a layout, and comes from stored boxes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.partition import partition_layers
from megatron_lite.sharding.placement import Box, Cut
from megatron_lite.sharding.plan import Boxes, LogicalTensor, copies, shard_contents, stage_of

TENSORS = {
    "embedding.word_embeddings.weight": LogicalTensor((90, 4), Cut(dim=0, length=96)),
    "embedding.position_embeddings.weight": LogicalTensor((8, 4), None),
    **{f"layers.{n}.attention.query.weight": LogicalTensor((8, 4), Cut(0, 8)) for n in range(5)},
    **{f"layers.{n}.mlp.down.weight": LogicalTensor((4, 8), Cut(1, 8)) for n in range(5)},
    **{f"layers.{n}.input_norm.weight": LogicalTensor((4,), None) for n in range(5)},
    "final_norm.weight": LogicalTensor((4,), None),
    "output_layer.weight": LogicalTensor((90, 4), Cut(dim=0, length=96)),
}


@dataclass(frozen=True)
class Stored:
    box: Box


@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_a_layout_holds_every_element_once(tp: int, pp: int) -> None:
    layers = partition_layers(5, pp)
    counts = {name: np.zeros(tensor.shape, int) for name, tensor in TENSORS.items()}
    for stage in range(pp):
        for rank in range(tp):
            for name, box in shard_contents(TENSORS, layers, stage=stage, tp_rank=rank, tp_size=tp):
                assert stage_of(name, layers) == stage
                counts[name][box.slices()] += 1
    for name, count in counts.items():
        assert (count == 1).all(), name


def test_a_rank_with_padding_alone_has_no_box() -> None:
    tensors = {"embedding.word_embeddings.weight": LogicalTensor((90, 4), Cut(0, 128))}
    held = [
        list(shard_contents(tensors, [range(1)], stage=0, tp_rank=rank, tp_size=4))
        for rank in range(4)
    ]
    assert [len(boxes) for boxes in held] == [1, 1, 1, 0]
    assert held[2][0][1] == Box((64, 0), (26, 4))


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers.0.mlp.down.weight: dimension 1 of length 8"):
        list(
            shard_contents(
                {"layers.0.mlp.down.weight": TENSORS["layers.0.mlp.down.weight"]},
                [range(1)],
                stage=0,
                tp_rank=0,
                tp_size=3,
            )
        )


def test_copies_put_a_box_together() -> None:
    whole = np.arange(24).reshape(4, 6)
    stored = [Stored(Box((0, 0), (4, 2))), Stored(Box((0, 2), (1, 4))), Stored(Box((1, 2), (3, 4)))]
    wanted = Box((0, 1), (3, 4))
    out = np.full(wanted.size, -1)
    for copy in copies(wanted, Boxes(stored)):
        held = whole[copy.source.box.slices()]
        part = held[copy.part.slices(copy.source.box.offset)]
        out[copy.part.slices(wanted.offset)] = part
    np.testing.assert_array_equal(out, whole[wanted.slices()])


def test_a_gap_is_refused() -> None:
    with pytest.raises(ValueError, match="8 of 12 elements"):
        copies(Box((0, 0), (3, 4)), Boxes([Stored(Box((0, 0), (2, 4)))]))


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_boxes_are_found_as_by_looking_at_all(dims: int) -> None:
    draw = np.random.default_rng(dims)
    for _ in range(40):
        stored = [Stored(box_in(draw, dims)) for _ in range(draw.integers(0, 12))]
        wanted = box_in(draw, dims)
        meeting = {stored.index(copy.source): copy.part for copy in Boxes(stored).meeting(wanted)}
        parts = {n: one.box.intersect(wanted) for n, one in reversed([*enumerate(stored)])}
        assert set(meeting.values()) == {part for part in parts.values() if part is not None}
        pairs = combinations(stored, 2)
        assert Boxes(stored).overlap() == any(a.box.intersect(b.box) for a, b in pairs)


def box_in(draw: np.random.Generator, dims: int) -> Box:
    offset = draw.integers(0, 8, dims)
    return Box(tuple(map(int, offset)), tuple(map(int, draw.integers(1, 9 - offset))))
