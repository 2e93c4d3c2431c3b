"""The documents of an epoch: each once, shuffled, and in an order that no release may change."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.document_order import DocumentOrder, Piece


def _documents(lengths: np.ndarray, *key: int | str) -> list[int]:
    return [piece.document for piece in DocumentOrder(lengths, *key).pieces(0)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=1100),
    seed=st.integers(0, 2**63),
    shuffle=st.booleans(),
)
def test_every_token_comes_once(lengths: list[int], seed: int, shuffle: bool) -> None:
    order = DocumentOrder(np.array(lengths, dtype=np.int32), *([seed, 4] if shuffle else []))
    pieces = list(order.pieces(0))
    assert sorted(pieces) == [Piece(d, 0, length) for d, length in enumerate(lengths) if length]
    assert shuffle or pieces == sorted(pieces)


@pytest.mark.parametrize("documents", [3, 256, 257, 5000])
@pytest.mark.parametrize("key", [(), (7, "documents", 2)])
def test_an_epoch_can_be_entered_anywhere(documents: int, key: tuple[int | str, ...]) -> None:
    lengths = np.random.default_rng(0).integers(0, 12, documents, dtype=np.int32)
    order = DocumentOrder(lengths, *key)
    positions = [
        (piece.document, piece.offset + token)
        for piece in order.pieces(0)
        for token in range(piece.length)
    ]
    for position in np.random.default_rng(1).integers(0, len(positions), 200).tolist():
        first = next(order.pieces(position))
        assert (first.document, first.offset) == positions[position]
        assert first.offset + first.length == lengths[first.document]


def test_the_order_never_changes() -> None:
    """Runs are resumed on other machines and library versions: the order is part of the format."""
    few = _documents(np.full(12, 3, dtype=np.int32), 1234, "documents", 0)
    assert few == [6, 8, 1, 4, 0, 7, 10, 11, 5, 9, 3, 2]
    many = _documents(np.full(10_000, 3, dtype=np.int32), 1234, "documents", 0)
    assert many[:6] == [2945, 7748, 9579, 8663, 721, 5110]
    assert many[5000:5006] == [5563, 7531, 2231, 388, 6261, 3109]


def test_neighbours_of_the_corpus_are_parted() -> None:
    """With 10,000 documents a group is one out of each stretch of 40."""
    order = np.array(_documents(np.ones(10_000, dtype=np.int32), 5))
    assert (np.abs(np.diff(order)) > 1).mean() > 0.99
    group = np.sort(order[:250])
    assert (group // 40 == np.arange(250)).all()


def test_neighbours_of_the_corpus_are_in_groups_far_apart() -> None:
    """In windows of many short documents, which span several groups."""
    order = np.array(_documents(np.ones(100_000, dtype=np.int32), 5))
    place = np.argsort(order)
    assert (np.abs(np.diff(place)) < 1000).mean() < 0.03  # 0.02 by chance


def test_who_follows_whom_is_another_matter_in_each_epoch() -> None:
    lengths = np.ones(10_000, dtype=np.int32)
    pairs = [
        {tuple(sorted(pair)) for pair in pairwise(order)}
        for order in (_documents(lengths, 5, epoch) for epoch in range(3))
    ]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert len(pairs[one] & pairs[other]) < 20  # 2 expected by chance


def test_every_document_is_equally_likely_to_come_early() -> None:
    lengths = np.ones(1000, dtype=np.int32)
    early = np.zeros(1000)
    for seed in range(400):
        early[_documents(lengths, seed)[:250]] += 1
    assert np.abs(early - 100).max() < 45  # 5 standard deviations of 8.7
