"""SampleSource: what blends, the loader and whoever counts epochs know of a data set."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


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
