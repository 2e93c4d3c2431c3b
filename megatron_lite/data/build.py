"""The data section of a config → the training, validation and test datasets.

Opens files and checks at start what would otherwise fail late; reads no token. Called by the
composition root (megatron_lite.build) on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from megatron_lite.config.blend import parse_blend
from megatron_lite.config.split import parse_split
from megatron_lite.data.blended import BlendedDataset
from megatron_lite.data.errors import DataError, TooSmallError
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.packed_dataset import PackedDataset, has_loss_mask
from megatron_lite.data.source import CorpusSource

PARTS = ("train", "valid", "test")


class DataSection(Protocol):
    """The fields of the config's data section that are read here."""

    @property
    def data_path(self) -> str | Sequence[float | str] | None: ...
    @property
    def split(self) -> str: ...
    @property
    def sft(self) -> bool: ...
    @property
    def train_data_path(self) -> str | Sequence[float | str] | None: ...
    @property
    def valid_data_path(self) -> str | Sequence[float | str] | None: ...
    @property
    def test_data_path(self) -> str | Sequence[float | str] | None: ...


@dataclass(frozen=True)
class Datasets:
    """The three parts; a part that was not required and can't be built is None."""

    train: BlendedDataset
    valid: BlendedDataset | None
    test: BlendedDataset | None


def document_ranges(split: str, num_documents: int) -> list[tuple[int, int]]:
    """Return the [first, last) documents of the training, validation and test parts.

    Disjoint, in order and covering: a boundary is the cumulative share of the documents, rounded to
    the nearest, halves up. Raises ValueError as parse_split does.
    """
    train, valid, _ = parse_split(split)
    bounds = [0, *(int(share * num_documents + 0.5) for share in (train, train + valid))]
    bounds.append(num_documents)
    return list(pairwise(bounds))


def build_datasets(
    data: DataSection,
    *,
    seq_length: int,
    seed: int,
    required: Collection[str] = ("train",),
    vocab_size: int | None = None,
) -> Datasets:
    """Build the parts from data_path and split, or from the three paths of their own.

    `required` names the parts that the run will read, beside train: one without a path, or with a
    source that has a weight but too few tokens for a sample, is a DataError that names it. A part
    that isn't required is None then. Unusable files are a DataError in any case. With vocab_size,
    reading a token id outside the vocabulary is a DataError.
    """
    needed = {"train", *required}
    opened: dict[str, IndexedDataset] = {}

    kind = PackedDataset if data.sft else GPTDataset

    def source(name: str, prefix: str) -> CorpusSource:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix)
            if has_loss_mask(prefix) and not data.sft:
                raise DataError(
                    f"{prefix}: packed conversations with a loss mask, but data.sft is false; set "
                    f"it, or move the loss mask away to learn all of it as plain text"
                )
        indexed = opened[prefix]
        documents = (0, indexed.num_documents)
        if data.data_path is not None:
            documents = document_ranges(data.split, indexed.num_documents)[PARTS.index(name)]
        return kind(
            indexed,
            seq_length=seq_length,
            seed=seed,
            document_range=documents,
            vocab_size=vocab_size,
        )

    def part(name: str) -> BlendedDataset | None:
        try:
            blend = _blend(data, name)
            sources = [source(name, prefix) for _, prefix in blend]
        except TooSmallError as error:
            if name in needed:
                raise DataError(f"{name} part: {error}") from error
            return None
        except DataError as error:
            raise DataError(f"{name} part: {error}") from error
        return BlendedDataset(sources, [weight for weight, _ in blend]) if sources else None

    parts = {name: part(name) for name in PARTS}
    for name in sorted(needed):
        if parts[name] is None:
            raise DataError(f"{name} part: no data.data_path and no data.{name}_data_path")
    train = parts["train"]
    assert train is not None
    return Datasets(train, parts["valid"], parts["test"])


def _blend(data: DataSection, name: str) -> list[tuple[float, str]]:
    """Return (weight, prefix) of a part's sources with a weight; none when it has no path."""
    path = data.data_path
    if path is None:
        path = getattr(data, f"{name}_data_path")
    if path is None:
        return []
    return [(weight, prefix) for weight, prefix in parse_blend(path) if weight > 0]
