"""What the loader, blends and whoever counts epochs know of a data set."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_lite.data.document_order import Piece
from megatron_lite.data.indexed_dataset import IndexedDataset


class SampleSource(Protocol):
    """A GPTDataset, a PackedDataset or a blend of either: samples by number, without an end."""

    seq_length: int

    @property
    def samples_per_epoch(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return int64 tokens [seq_length + 1], or [3, seq_length + 1] of packed conversations:
        tokens, loss mask, conversation."""


class CorpusSource(SampleSource, Protocol):
    """A GPTDataset or a PackedDataset: the samples of one corpus."""

    indexed: IndexedDataset

    def pieces(self, sample: int) -> list[Piece]:
        """Return where the tokens of a sample lie; documents by their number in the file."""
