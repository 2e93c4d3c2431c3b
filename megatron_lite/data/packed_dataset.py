"""Samples of packed conversations, as tools/preprocess_chat.py writes them.

A document of the .bin/.idx pair is a pack of seq_length + 1 tokens, its sequences are whole
conversations and at last the padding. A second pair, PREFIX_loss_mask, tells which tokens count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_lite.data.document_order import Piece
from megatron_lite.data.errors import DataError, TooSmallError
from megatron_lite.data.indexed_dataset import IndexedDataset, idx_path
from megatron_lite.data.permutation import KeyedPermutation

MASK_SUFFIX = "_loss_mask"


def has_loss_mask(prefix: str) -> bool:
    """Whether a corpus was made by tools/preprocess_chat.py."""
    return idx_path(f"{prefix}{MASK_SUFFIX}").is_file()


class PackedDataset:
    """`dataset[k]`: int64 [3, seq_length + 1]: tokens, loss mask of 0 and 1, conversation.

    Conversations are numbered in their pack; the padding is one more. Every epoch shows each pack
    of document_range once, in an order keyed by (seed, epoch); sample k depends on nothing else,
    and there is no end. document_range is (first, last), the last not included. DataError for files
    that are no such pair or were packed for another seq_length; TooSmallError, which is one too,
    for a range without packs; with vocab_size reading a larger token id is a DataError.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seq_length: int,
        seed: int,
        document_range: tuple[int, int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.indexed, self.seq_length, self.vocab_size = indexed, seq_length, vocab_size
        self.document_range = document_range or (0, indexed.num_documents)
        if self.samples_per_epoch < 1:
            raise TooSmallError(
                f"{indexed.prefix}: no pack in this part; give more data or another split"
            )
        self._seed = seed
        if not has_loss_mask(indexed.prefix):
            raise DataError(
                f"{indexed.prefix}{MASK_SUFFIX}.idx: no such file; with data.sft a corpus is what "
                f"tools/preprocess_chat.py writes"
            )
        self._mask = IndexedDataset(f"{indexed.prefix}{MASK_SUFFIX}")
        self._check_pair()

    def _check_pair(self) -> None:
        tokens, mask = self.indexed, self._mask
        if not np.array_equal(tokens.sequence_lengths, mask.sequence_lengths):
            raise DataError(
                f"{mask.prefix}: other lengths than {tokens.prefix}; make both again with "
                f"tools/preprocess_chat.py"
            )
        sizes = tokens.document_lengths(0, tokens.num_documents)
        other = sizes[sizes != self.seq_length + 1]
        if other.size:
            raise DataError(
                f"{tokens.prefix}: packed for sequences of {other[0] - 1} tokens, but "
                f"model.seq_length is {self.seq_length}; change it, or pack again with "
                f"tools/preprocess_chat.py --seq-length {self.seq_length}"
            )

    @property
    def samples_per_epoch(self) -> int:
        """Packs of the range."""
        first, last = self.document_range
        return last - first

    @property
    def num_tokens(self) -> int:
        """Tokens in the packs of the range, padding included."""
        return self.samples_per_epoch * (self.seq_length + 1)

    def pack(self, sample: int) -> int:
        """Return the number of the pack in its file that sample number `sample` shows."""
        if sample < 0:
            raise IndexError(f"sample numbers start at 0, got {sample}")
        epoch, position = divmod(sample, self.samples_per_epoch)
        order = KeyedPermutation(self.samples_per_epoch, self._seed, "packs", epoch)
        return self.document_range[0] + order(position)

    def pieces(self, sample: int) -> list[Piece]:
        """Return where the tokens of a sample lie: a whole document."""
        return [Piece(self.pack(sample), 0, self.seq_length + 1)]

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return sample number `sample`; IndexError when negative."""
        pack, size = self.pack(sample), self.seq_length + 1
        rows = np.empty((3, size), dtype=np.int64)
        rows[0] = self.indexed.read(pack * size, (pack + 1) * size)
        rows[1] = self._mask.read(pack * size, (pack + 1) * size)
        first, last = self.indexed.document_indices[pack : pack + 2]
        lengths = self.indexed.sequence_lengths[first:last]
        rows[2] = np.repeat(np.arange(last - first), lengths)
        if self.vocab_size is not None and int(rows[0].max()) >= self.vocab_size:
            raise DataError(
                f"{self.indexed.prefix}: token id {int(rows[0].max())} in pack {pack}, but the "
                f"vocabulary has {self.vocab_size} ids; was the data made with another tokenizer?"
            )
        return rows
