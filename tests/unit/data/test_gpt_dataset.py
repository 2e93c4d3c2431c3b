"""Samples read from files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megatron_lite.data.errors import DataError
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed_dataset import IndexedDataset

WriteDocuments = Callable[..., IndexedDataset]


@pytest.mark.parametrize("cuts", [[], [3, 64, 65, 700], list(range(7, 1025, 31))])
def test_b08_sequence_windows(write_documents: WriteDocuments, cuts: list[int]) -> None:
    dataset = GPTDataset(
        write_documents(np.split(np.arange(1025), cuts)), seq_length=64, seed=0, shuffle=False
    )
    assert dataset.samples_per_epoch == 16
    samples = [dataset[k] for k in range(16)]
    assert {sample.shape for sample in samples} == {(65,)}
    assert samples[0].dtype == np.int64
    assert np.concatenate([s[:-1] for s in samples]).tolist() == list(range(1024))
    assert np.concatenate([s[1:] for s in samples]).tolist() == list(range(1, 1025))


def test_b08_a_file_that_is_too_small_is_named(write_documents: WriteDocuments) -> None:
    with pytest.raises(DataError, match="corpus: too small: 64 tokens"):
        GPTDataset(write_documents([range(64)]), seq_length=64, seed=0)


def test_b09_shuffled_samples_cover_the_epoch(write_documents: WriteDocuments) -> None:
    dataset = GPTDataset(write_documents([range(1025)]), seq_length=64, seed=3)
    inputs = np.concatenate([dataset[k][:-1] for k in range(16)])
    assert sorted(inputs.tolist()) == list(range(1024))
    for k in range(40):
        sample = dataset[k]
        assert np.all((np.diff(sample) == 1) | (sample[1:] == 0))


def test_only_the_documents_of_the_range_are_read(write_documents: WriteDocuments) -> None:
    indexed = write_documents([[document] * 10 for document in range(6)])
    dataset = GPTDataset(indexed, seq_length=7, seed=1, document_range=(2, 5))
    assert dataset.num_tokens == 30
    seen = np.unique(np.concatenate([dataset[k] for k in range(12)]))
    assert seen.tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="documents 2 to 7"):
        GPTDataset(indexed, seq_length=7, seed=1, document_range=(2, 7))


def test_a_sample_depends_on_nothing_else(write_documents: WriteDocuments) -> None:
    indexed = write_documents([range(n * 50, n * 50 + n + 1) for n in range(40)])
    one, other = (GPTDataset(indexed, seq_length=16, seed=5) for _ in range(2))
    backwards = [other[k] for k in reversed(range(120))][::-1]
    assert all(np.array_equal(one[k], backwards[k]) for k in range(120))


def test_an_id_outside_the_vocabulary_is_named(write_documents: WriteDocuments) -> None:
    dataset = GPTDataset(write_documents([[1, 2, 99, 3, 4]]), seq_length=4, seed=0, vocab_size=99)
    with pytest.raises(DataError, match="token id 99 in sample 0, but the vocabulary has 99"):
        dataset[0]
