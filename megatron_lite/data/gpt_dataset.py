"""Samples of next-token prediction: k → seq_length + 1 tokens, for any k ≥ 0.

The order is token_stream's; this file only reads the tokens. Not a torch dataset and without an
end: the caller counts. Called by build, blended and the loader.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_lite.data.document_order import Piece
from megatron_lite.data.errors import DataError, TooSmallError
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.token_stream import TokenStream


class GPTDataset:
    """`dataset[k]`: int64 tokens [seq_length + 1]; inputs are [:-1], labels are [1:].

    A pure function of (seed, the documents in document_range, k): independent of the length of the
    run, the data-parallel size, the micro-batch size and the number of workers. document_range is
    (first, last), the last not included. With vocab_size a larger token id is a DataError; a
    range with fewer than seq_length + 1 tokens is a TooSmallError, which is one too.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        seq_length: int,
        seed: int,
        document_range: tuple[int, int] | None = None,
        shuffle: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        first, last = document_range or (0, indexed.num_documents)
        if not 0 <= first <= last <= indexed.num_documents:
            raise ValueError(
                f"documents {first} to {last} of {indexed.prefix}, which has "
                f"{indexed.num_documents}"
            )
        if indexed.dtype.kind == "f":
            raise DataError(f"{indexed.prefix}: holds {indexed.dtype.name}, not token ids")
        self.indexed = indexed
        self.seq_length = seq_length
        self.document_range = (first, last)
        self.vocab_size = vocab_size
        try:
            self.stream = TokenStream(
                indexed.document_lengths(first, last),
                seq_length=seq_length,
                seed=seed,
                shuffle=shuffle,
            )
        except TooSmallError as error:
            raise TooSmallError(f"{indexed.prefix}: {error}") from error

    @property
    def samples_per_epoch(self) -> int:
        """Samples in the first pass over the documents."""
        return self.stream.samples_per_epoch

    @property
    def num_tokens(self) -> int:
        """Tokens in the documents of the range."""
        return self.stream.num_tokens

    def pieces(self, sample: int) -> list[Piece]:
        """Return where the tokens of a sample lie; documents by their number in the file."""
        first = self.document_range[0]
        return [Piece(first + document, *run) for document, *run in self.stream.pieces(sample)]

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return sample number `sample`; IndexError when negative."""
        tokens = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for document, offset, length in self.pieces(sample):
            start = self.indexed.document_start(document) + offset
            tokens[filled : filled + length] = self.indexed.read(start, start + length)
            filled += length
        if self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            raise DataError(
                f"{self.indexed.prefix}: token id {int(tokens.max())} in sample {sample}, but the "
                f"vocabulary has {self.vocab_size} ids; was the data made with another tokenizer?"
            )
        return tokens
