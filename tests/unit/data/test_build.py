"""Config section → the three parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.build import build_datasets, document_ranges
from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_dataset import IndexedDataset

WriteDocuments = Callable[..., IndexedDataset]


@dataclass
class Section:
    data_path: Any = None
    split: str = "969,30,1"
    train_data_path: Any = None
    valid_data_path: Any = None
    test_data_path: Any = None
    sft: bool = False


@pytest.mark.parametrize(
    ("split", "documents", "sizes"),
    [
        ("969,30,1", 1000, (969, 30, 1)),
        ("969,30,1", 100, (97, 3, 0)),
        ("969,30,1", 10, (10, 0, 0)),
        ("969,30,1", 1, (1, 0, 0)),
        ("969, 30, 1", 1000, (969, 30, 1)),
        ("100,0,0", 7, (7, 0, 0)),
        ("1,1,1", 10, (3, 4, 3)),
        ("0,0,1", 10, (0, 0, 10)),
    ],
)
def test_b11_split(split: str, documents: int, sizes: tuple[int, ...]) -> None:
    ranges = document_ranges(split, documents)
    assert tuple(last - first for first, last in ranges) == sizes
    assert ranges[0][0] == 0 and ranges[2][1] == documents
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "nan,1,1", "1,1,1,1"])
def test_b11_bad_splits_are_refused(split: str) -> None:
    with pytest.raises(ValueError):
        document_ranges(split, 10)


def test_b11_an_empty_part_fails_only_when_required(write_documents: WriteDocuments) -> None:
    prefix = write_documents([range(50)] * 10).prefix
    datasets = build_datasets(Section(prefix), seq_length=8, seed=0)
    assert datasets.train.samples_per_epoch == 62
    assert datasets.valid is None and datasets.test is None
    with pytest.raises(DataError, match=r"valid part: .*corpus: too small: 0 tokens in 0 doc"):
        build_datasets(Section(prefix), seq_length=8, seed=0, required=("train", "valid"))


def test_parts_hold_different_documents(write_documents: WriteDocuments) -> None:
    prefix = write_documents([[document] * 20 for document in range(10)]).prefix
    datasets = build_datasets(
        Section(prefix, split="6,3,1"), seq_length=9, seed=0, required=("train", "valid", "test")
    )
    seen = [
        set(np.concatenate([part[k] for k in range(40)]).tolist())
        for part in (datasets.train, datasets.valid, datasets.test)
        if part is not None
    ]
    assert seen == [set(range(6)), {6, 7, 8}, {9}]


def test_paths_of_their_own_are_used_whole(write_documents: WriteDocuments) -> None:
    train = write_documents([range(0, 30)], name="a").prefix
    valid = write_documents([range(100, 120)], name="b").prefix
    datasets = build_datasets(
        Section(train_data_path=train, valid_data_path=[valid]), seq_length=8, seed=0
    )
    assert datasets.train.num_tokens == 30
    assert datasets.valid is not None and datasets.valid.num_tokens == 20
    assert datasets.test is None
    with pytest.raises(DataError, match=r"test part: no data\.data_path and no data\.test_data"):
        build_datasets(
            Section(train_data_path=train), seq_length=8, seed=0, required=("train", "test")
        )


def test_a_blend_leaves_out_zero_weights(write_documents: WriteDocuments) -> None:
    prefixes = [write_documents([range(n, n + 99)], name=f"c{n}").prefix for n in (0, 100)]
    datasets = build_datasets(
        Section([0.5, prefixes[0], 0, "/nowhere/at/all", 1.5, prefixes[1]], split="1,0,0"),
        seq_length=8,
        seed=0,
    )
    assert datasets.train.blend.weights == [0.25, 0.75]


def test_a_missing_file_is_named_with_its_part() -> None:
    with pytest.raises(DataError, match=r"train part: /nowhere/x.idx: no such file"):
        build_datasets(Section("/nowhere/x"), seq_length=8, seed=0)


def test_a_broken_file_is_told_even_if_its_part_is_not_required(
    write_documents: WriteDocuments,
) -> None:
    train = write_documents([range(0, 30)], name="a").prefix
    with pytest.raises(DataError, match=r"valid part: /nowhere/x.idx: no such file"):
        build_datasets(
            Section(train_data_path=train, valid_data_path="/nowhere/x"), seq_length=8, seed=0
        )


def test_train_is_always_required(write_documents: WriteDocuments) -> None:
    prefix = write_documents([range(5)]).prefix
    with pytest.raises(DataError, match=r"train part: .*too small: 5 tokens"):
        build_datasets(Section(prefix, split="1"), seq_length=8, seed=0, required=())


def test_the_vocabulary_reaches_the_datasets(write_documents: WriteDocuments) -> None:
    prefix = write_documents([range(50)]).prefix
    datasets = build_datasets(Section(prefix), seq_length=8, seed=0, vocab_size=10)
    with pytest.raises(DataError, match="vocabulary has 10"):
        [datasets.train[k] for k in range(6)]
