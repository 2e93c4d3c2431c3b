"""Which tokens sample k shows, over epochs and document cuts."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.errors import DataError
from megatron_lite.data.token_stream import TokenStream


def _tokens(stream: TokenStream, starts: np.ndarray, sample: int) -> np.ndarray:
    """Return the corpus positions of a sample; document d starts at starts[d]."""
    runs = [
        starts[piece.document] + np.arange(piece.offset, piece.offset + piece.length)
        for piece in stream.pieces(sample)
    ]
    return np.concatenate(runs)


def _stream(lengths: list[int], seq_length: int, seed: int) -> tuple[TokenStream, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return TokenStream(np.array(lengths), seq_length=seq_length, seed=seed), starts


CUTS = [[1025], [400, 1, 300, 0, 324], [5] * 205]


@pytest.mark.parametrize("lengths", CUTS, ids=["one", "four", "many"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("requested", [16, 32, 33, 40])
def test_b09_positions_are_served_evenly(lengths: list[int], seed: int, requested: int) -> None:
    stream, starts = _stream(lengths, 64, seed)
    served = np.zeros(1025, dtype=int)
    for sample in range(requested):
        np.add.at(served, _tokens(stream, starts, sample)[:-1], 1)
    assert np.ptp(served) <= 1
    assert served.sum() == requested * 64


def test_b09_no_repeat_inside_an_epoch() -> None:
    stream, starts = _stream([1025], 64, 7)
    firsts = [int(_tokens(stream, starts, sample)[0]) for sample in range(16)]
    assert sorted(firsts) == list(range(0, 1024, 64))
    assert firsts != sorted(firsts)


def test_b09_seeds_decide_the_order() -> None:
    orders = {
        tuple(tuple(_stream([5] * 205, 64, seed)[0].pieces(sample)) for sample in range(16))
        for seed in (1, 2, 3, 1)
    }
    assert len(orders) == 3


def test_b09_every_epoch_has_its_own_order() -> None:
    stream, _ = _stream([5] * 205, 64, 1)
    epochs = {tuple(stream.pieces(16 * epoch + 1)) for epoch in range(5)}
    assert len(epochs) == 5


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    seq_length=st.integers(1, 16),
    seed=st.integers(0, 1000),
)
def test_b09_evenness_holds_at_every_moment(lengths: list[int], seq_length: int, seed: int) -> None:
    """For any corpus, after any number of samples; the tail of an epoch is never lost."""
    if sum(lengths) < seq_length + 1:
        return
    stream, starts = _stream(lengths, seq_length, seed)
    served = np.zeros(sum(lengths), dtype=int)
    for sample in range(4 * stream.samples_per_epoch + 3):
        tokens = _tokens(stream, starts, sample)
        assert len(tokens) == seq_length + 1
        np.add.at(served, tokens[:-1], 1)
        assert np.ptp(served) <= 1


@pytest.mark.parametrize(
    ("tokens", "first", "second"), [(1025, 16, 16), (1024, 15, 16), (65, 1, 1), (128, 1, 2)]
)
def test_b08_samples_of_the_first_epochs(tokens: int, first: int, second: int) -> None:
    stream = TokenStream(np.array([tokens]), seq_length=64, seed=0)
    assert stream.samples_per_epoch == first
    assert stream.first_sample(1) == first
    assert stream.first_sample(2) - first == second
    assert [stream.epoch_of(sample) for sample in (0, first - 1, first)] == [0, 0, 1]


def test_b08_the_sixteenth_of_1024_tokens_enters_epoch_2() -> None:
    stream = TokenStream(np.array([1024]), seq_length=64, seed=0)
    assert [tuple(piece) for piece in stream.pieces(15)] == [(0, 960, 64), (0, 0, 1)]


def test_b08_64_tokens_are_too_small() -> None:
    with pytest.raises(DataError, match=r"64 tokens in 1 documents.* needs 65"):
        TokenStream(np.array([64]), seq_length=64, seed=0)


def test_b02_huge_documents() -> None:
    lengths = np.array([1_500_000_000, 1_500_000_000], dtype=np.int32)
    stream = TokenStream(lengths, seq_length=1_048_576, seed=0, shuffle=False)
    assert stream.samples_per_epoch == 2861
    before = (0, -1)
    for sample in range(2861):
        for document, offset, length in stream.pieces(sample):
            assert offset >= 0 and 0 < length <= 1_048_577
            assert (document, offset) >= before
            before = (document, offset)
    assert before[0] == 1


def test_b02_sixty_thousand_epochs_need_no_memory() -> None:
    stream = TokenStream(np.full(100, 500, dtype=np.int32), seq_length=512, seed=0)
    last = (60_000 * 50_000 - 1) // 512 - 1
    assert stream.epoch_of(last) == 59_999
    for sample in (last, 0, last // 2, last - 1):
        pieces = stream.pieces(sample)
        assert sum(piece.length for piece in pieces) == 513
        assert all(0 <= piece.document < 100 and 0 <= piece.offset < 500 for piece in pieces)
    assert len(stream._orders) <= 2


def test_a_sample_of_a_large_corpus_takes_little_memory() -> None:
    """Nothing as long as the list of documents is made, in any epoch."""
    lengths = np.random.default_rng(0).integers(1, 1600, 1_000_000, dtype=np.int32)
    tracemalloc.start()
    stream = TokenStream(lengths, seq_length=2048, seed=0)
    for epoch in range(3):
        stream.pieces(stream.first_sample(epoch) + 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.1 * lengths.nbytes


def test_access_in_any_order_gives_the_same() -> None:
    lengths = np.array([37, 90, 11, 62])
    ordered = TokenStream(lengths, seq_length=16, seed=5)
    expected = [ordered.pieces(sample) for sample in range(60)]
    jumping = TokenStream(lengths, seq_length=16, seed=5)
    for sample in np.random.default_rng(0).permutation(60).tolist():
        assert jumping.pieces(sample) == expected[sample]


def test_a_negative_sample_is_refused() -> None:
    with pytest.raises(IndexError):
        TokenStream(np.array([100]), seq_length=8, seed=0).pieces(-1)
