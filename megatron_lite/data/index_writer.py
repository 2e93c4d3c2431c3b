"""The bytes of an .idx file, written piece by piece, so that memory does not grow with it.

The format is Megatron-LM's; indexed_dataset reads it. Called by indexed_builder and work_folder.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_lite.data.indexed_dataset import DTYPES, HEADER, MAGIC, VERSION

_PIECE = 1 << 20  # entries a step


def write_index(
    file: BinaryIO,
    dtype: np.dtype,
    lengths: npt.NDArray[np.integer],
    sequences: npt.NDArray[np.integer],
) -> None:
    """Write the index of tokens of `dtype` in sequences of `lengths`.

    `sequences` [documents] says how many sequences each document has. Both may be memory-mapped.
    """
    code = DTYPES.index(dtype) + 1
    file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(sequences) + 1))
    for start in range(0, len(lengths), _PIECE):
        file.write(lengths[start : start + _PIECE].astype("<i4").tobytes())
    _write_starts(file, lengths, scale=dtype.itemsize)
    last = _write_starts(file, sequences, scale=1)
    file.write(np.array([last], dtype="<i8").tobytes())


def _write_starts(file: BinaryIO, counts: npt.NDArray[np.integer], *, scale: int) -> int:
    """Write where each entry starts, in int64, and return where the last one ends."""
    start = 0
    for first in range(0, len(counts), _PIECE):
        ends = start + np.cumsum(counts[first : first + _PIECE], dtype=np.int64) * scale
        file.write(np.concatenate([[start], ends[:-1]]).astype("<i8").tobytes())
        start = int(ends[-1])
    return start
