"""Reader of the .bin/.idx pair, byte-compatible with Megatron-LM; the writer is indexed_builder.

Every file is memory-mapped, so a worker process shares the pages. Knows nothing of samples, seeds
or tokenizers. Called by GPTDataset and the tools.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError
from megatron_lite.data.index_check import check_index

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices
DTYPES: tuple[np.dtype, ...] = tuple(
    np.dtype(name).newbyteorder("<")
    for name in ("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")  # codes 1 … 8, Megatron's order
)

_BLOCK = 1 << 16  # documents worked on at once


def bin_path(prefix: str | Path) -> Path:
    """Return the token file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the index file of a prefix."""
    return Path(f"{prefix}.idx")


def byte_offsets(lengths: npt.NDArray[np.integer], item_size: int) -> npt.NDArray[np.int64]:
    """Return where each sequence starts, and last the end: int64 bytes [sequences + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    offsets *= item_size
    return offsets


def _map_file(path: Path, *, prefix: str | Path) -> mmap.mmap | bytes:
    """Map a file read-only; DataError when it can't be opened."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; {prefix!s} must be the prefix of a .bin/.idx pair, without "
            f"extension (tools/preprocess_data.py writes PREFIX_KEY_document)"
        )
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # the system refuses to map nothing
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; check the file's permissions") from error


class IndexedDataset:
    """Token sequences grouped into documents; `dataset[i]` is a view of sequence i.

    sequence_lengths int32 [sequences], sequence_pointers int64 [sequences] (bytes),
    document_indices int64 [documents + 1] (document d is sequences [indices[d], indices[d + 1])).
    DataError when the files are missing, truncated, of another format or don't fit together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index = _map_file(idx_path(prefix), prefix=prefix)
        sequences, documents = self._read_header(index)
        position = HEADER.size
        self.sequence_lengths: npt.NDArray[np.int32] = np.frombuffer(
            index, dtype="<i4", count=sequences, offset=position
        )
        position += 4 * sequences
        self.sequence_pointers: npt.NDArray[np.int64] = np.frombuffer(
            index, dtype="<i8", count=sequences, offset=position
        )
        position += 8 * sequences
        self.document_indices: npt.NDArray[np.int64] = np.frombuffer(
            index, dtype="<i8", count=documents, offset=position
        )
        payload = _map_file(bin_path(prefix), prefix=prefix)
        self._one_each = check_index(
            idx_path(prefix),
            header=HEADER.size,
            sequences=sequences,
            documents=documents,
            item_size=self.dtype.itemsize,
            payload=len(payload),
        )
        self._tokens = np.frombuffer(payload, dtype=self.dtype)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)  # a worker started afresh maps the files itself

    def _read_header(self, index: mmap.mmap | bytes) -> tuple[int, int]:
        """Check the header and the file's size; return the two counts and set dtype."""
        path = idx_path(self.prefix)
        remedy = "make the pair again with tools/preprocess_data.py"
        if len(index) < HEADER.size or index[: len(MAGIC)] != MAGIC:
            raise DataError(f"{path}: not a Megatron index file (wrong magic bytes); {remedy}")
        _, version, code, sequences, documents = HEADER.unpack_from(index)
        if version != VERSION:
            raise DataError(f"{path}: index version {version}, only {VERSION} is known; {remedy}")
        if not 1 <= code <= len(DTYPES):
            raise DataError(f"{path}: unknown dtype code {code}, known are 1 to 8; {remedy}")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if len(index) != expected:
            raise DataError(
                f"{path}: {len(index)} bytes, but {sequences} sequences and {documents} document "
                f"indices take {expected}; the file is truncated or of another kind: {remedy}"
            )
        self.dtype = DTYPES[code - 1]
        return sequences, documents

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the .bin file."""
        return len(self._tokens)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """Return sequence `index` as a read-only view; negative numbers count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        return self.get(index % len(self))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return `length` tokens (null: the rest) of sequence `index` from `offset`, as a view."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        size = int(self.sequence_lengths[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(
                f"tokens {offset} to {stop} of sequence {index} of {self.prefix}, which has {size}"
            )
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self._tokens[start + offset : start + stop]

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens [start, stop) of the whole file as a view, whatever the sequence cuts."""
        return self._tokens[start:stop]

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the tokens at positions of the whole file."""
        return self._tokens[positions]

    def document_at(self, position: int) -> int:
        """Return the document that holds a token of the whole file."""
        sequence = np.searchsorted(
            self.sequence_pointers, position * self.dtype.itemsize, side="right"
        )
        return int(np.searchsorted(self.document_indices, sequence - 1, side="right")) - 1

    def document_start(self, document: int) -> int:
        """Return the token of the whole file that a document starts at; the last one's end too."""
        sequence = document if self._one_each else int(self.document_indices[document])
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def document_lengths(self, first: int, last: int) -> npt.NDArray[np.integer]:
        """Return the tokens of documents first … last - 1: integers [last - first].

        A view of the mapped file where every document is one sequence, as preprocess writes them;
        otherwise int64 in memory.
        """
        if self._one_each:
            return self.sequence_lengths[first:last]
        lengths = np.empty(last - first, dtype=np.int64)
        for start in range(first, last, _BLOCK):
            stop = min(start + _BLOCK, last)
            bounds = self.document_indices[start : stop + 1]
            sequences = self.sequence_lengths[bounds[0] : bounds[-1]]
            ends = np.append(0, np.cumsum(sequences, dtype=np.int64))
            lengths[start - first : stop - first] = np.diff(ends[bounds - bounds[0]])
        return lengths
