"""Micro-batches from samples, in this process and in workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import islice

import pytest
import torch

from megatron_lite.data.boundaries import Boundaries
from megatron_lite.data.errors import DataError
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.loader import micro_batches
from megatron_lite.data.sampler import evaluation_batches, training_batches

WriteDocuments = Callable[..., IndexedDataset]


@pytest.fixture
def dataset(write_documents: WriteDocuments) -> GPTDataset:
    documents = [[*range(n, n + 9), 99] for n in range(30)]
    return GPTDataset(write_documents(documents), seq_length=16, seed=1)


def test_inputs_and_labels_are_shifted_by_one(dataset: GPTDataset) -> None:
    batch = next(micro_batches(dataset, [[4, 7]]))
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32
    assert batch.tokens.tolist() == [dataset[k][:-1].tolist() for k in (4, 7)]
    assert batch.labels.tolist() == [dataset[k][1:].tolist() for k in (4, 7)]
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert bool((batch.loss_mask == 1).all())


def test_b28_padding_has_no_weight(dataset: GPTDataset) -> None:
    batches = evaluation_batches(3, micro_batch_size=2, dp_rank=1, dp=2)
    assert batches == [[2, -1]]
    (batch,) = micro_batches(dataset, batches)
    assert batch.loss_mask.sum(dim=1).tolist() == [16, 0]
    assert batch.tokens[1].tolist() == batch.labels[1].tolist() == [0] * 16


def test_b28_an_evaluation_weighs_each_sample_once(dataset: GPTDataset) -> None:
    """The weighted token sums of two ranks over five samples are those of one rank."""

    def total(rank: int, dp: int) -> tuple[float, float]:
        batches = evaluation_batches(5, micro_batch_size=2, dp_rank=rank, dp=dp)
        parts = list(micro_batches(dataset, batches))
        return (
            sum(float((part.tokens * part.loss_mask).sum()) for part in parts),
            sum(float(part.loss_mask.sum()) for part in parts),
        )

    one, two = total(0, 2), total(1, 2)
    assert (one[0] + two[0], one[1] + two[1]) == total(0, 1)


def test_eod_masks_positions_that_read_it(dataset: GPTDataset) -> None:
    boundaries = Boundaries(eod=99, eod_mask_loss=True)
    batch = next(micro_batches(dataset, [[0, 1]], boundaries=boundaries))
    assert bool((batch.tokens == 99).any())
    assert torch.equal(batch.loss_mask == 0, batch.tokens == 99)
    assert batch.position_ids is None and batch.document_ids is None


def test_documents_restart_after_their_end(write_documents: WriteDocuments) -> None:
    """The end-of-document token is the last of its document; a sample begins at position 0."""
    documents = [[1, 2, 9], [9], [3, 4, 5, 9], [6, 7, 8]]
    dataset = GPTDataset(write_documents(documents), seq_length=9, seed=1, shuffle=False)
    boundaries = Boundaries(eod=9, reset_position_ids=True, reset_attention_mask=True)
    batch = next(micro_batches(dataset, [[0, -1]], boundaries=boundaries))
    assert batch.tokens[0].tolist() == [1, 2, 9, 9, 3, 4, 5, 9, 6]
    assert batch.position_ids is not None and batch.document_ids is not None
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0]
    assert batch.document_ids[0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]
    assert batch.position_ids[1].tolist() == list(range(9))


@pytest.mark.parametrize("name", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_boundaries_need_a_token_that_marks_them(name: str) -> None:
    with pytest.raises(DataError, match=f"data.{name}: the tokenizer has no"):
        Boundaries(eod=None, **{name: True})


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(dataset: GPTDataset, workers: int) -> None:
    def read(num_workers: int) -> list[list[list[int]]]:
        batches = training_batches(5, micro_batch_size=3, dp_rank=1, dp=2)
        loaded = micro_batches(dataset, batches, num_workers=num_workers)
        return [batch.tokens.tolist() for batch in islice(loaded, 12)]

    assert read(workers) == read(0)


def test_the_global_random_state_is_untouched(dataset: GPTDataset) -> None:
    before = torch.get_rng_state()
    list(micro_batches(dataset, [[0], [1]]))
    list(micro_batches(dataset, [[0], [1]], num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_in_a_worker_arrives(write_documents: WriteDocuments) -> None:
    dataset = GPTDataset(write_documents([range(40)]), seq_length=8, seed=0, vocab_size=10)
    with pytest.raises(DataError, match="vocabulary has 10"):
        list(micro_batches(dataset, [[0, 1, 2, 3]], num_workers=1))


def test_to_moves_all_tensors(dataset: GPTDataset) -> None:
    boundaries = Boundaries(eod=99, reset_position_ids=True, reset_attention_mask=True)
    batch = next(micro_batches(dataset, [[0]], boundaries=boundaries)).to("meta")
    tensors = [getattr(batch, field.name) for field in fields(batch)]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 5
