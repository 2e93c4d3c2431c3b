"""Read and write safetensors files a stretch at a time, in memory that does not grow with them.

The safetensors library maps a whole file, and wants all tensors of a new one at once; a resharding
has neither the address space nor the memory for that. The format is the same. Knows no manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_lite.checkpoint.direct import Bytes, DirectWriter
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.sharding.placement import Box

STRETCH_BYTES = 1 << 22
"""How much of a box is held in memory at a time."""

Values = npt.NDArray[Any]

# NumPy has no bfloat16: its bits are read as 16-bit integers.
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
}
_ALIGNMENT = 8
_OPEN_FILES = 128
_SHORT_RUN = 1 << 16
"""Below this many bytes it is cheaper to read what lies between two wanted stretches as well."""


class TensorReader:
    """The tensors of one file, read by position; nothing is mapped or kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path}: {_reason(error)}") from error
        try:
            self.data_start, self._entries = _read_header(self._file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._file.close()
            raise CheckpointError(f"{path}: is no whole safetensors file ({error})") from error

    @property
    def keys(self) -> list[str]:
        """Names of the tensors in the order in which they lie in the file."""
        return sorted(self._entries, key=lambda key: self._span(key)[0])

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._entry(key)["shape"])

    def code(self, key: str) -> str:
        """What safetensors calls its dtype."""
        return str(self._entry(key)["dtype"])

    def dtype(self, key: str) -> np.dtype[Any]:
        """What a tensor is read as; bfloat16 comes as its bits."""
        return DTYPES[self.code(key)]

    def read(self, key: str, part: Box) -> Values:
        """`part` of a tensor, in coordinates of the tensor itself, as a new array of its shape."""
        out = np.empty(part.size, dtype=self.dtype(key))
        self.read_into(out, key, part)
        return out

    def read_into(self, out: Values, key: str, part: Box) -> None:
        """Fill `out`, contiguous, of the part's shape and the tensor's dtype."""
        shape = self.shape(key)
        run = out.itemsize * prod(part.size[1:])
        if part.size[1:] != shape[1:] and run < _SHORT_RUN:
            self._read_rows(out, key, part)
        else:
            self._read_runs(out, shape, part, self._span(key)[0])

    def _read_rows(self, out: Values, key: str, part: Box) -> None:
        """Read whole rows, some at a time, and keep of them what is wanted."""
        inner = self.shape(key)[1:]
        columns = part.slices()[1:]
        step = max(1, STRETCH_BYTES // (out.itemsize * prod(inner)))
        for first in range(0, part.size[0], step):
            count = min(step, part.size[0] - first)
            offset = (part.offset[0] + first, *(0 for _ in inner))
            rows = self.read(key, Box(offset, (count, *inner)))
            out[first : first + count] = rows[(slice(None), *columns)]

    def _read_runs(self, out: Values, shape: tuple[int, ...], box: Box, start: int) -> None:
        """Read each contiguous run of `box` of an array of `shape`, `start` bytes into the data."""
        width = out.itemsize * prod(shape[1:])
        if box.size[1:] == shape[1:]:
            first = box.offset[0] if box.offset else 0
            self._fill(self.data_start + start + width * first, out)
            return
        inner = Box(box.offset[1:], box.size[1:])
        for row, values in enumerate(out, start=box.offset[0]):
            self._read_runs(values, shape[1:], inner, start + width * row)

    def _fill(self, position: int, out: Values) -> None:
        """Fill a contiguous array with the file's bytes from `position` on."""
        view = out.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file.fileno(), [view[done:]], position + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {_reason(error)}") from error
            if not count:
                raise CheckpointError(f"{self.path}: ends before its tensors do; it is truncated")
            done += count

    def _entry(self, key: str) -> Mapping[str, Any]:
        try:
            return self._entries[key]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor {key}") from None

    def _span(self, key: str) -> tuple[int, int]:
        begin, end = self._entry(key)["data_offsets"]
        return int(begin), int(end)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _read_header(file: Any) -> tuple[int, dict[str, Mapping[str, Any]]]:
    """Where the data begin, and what is said of each tensor; ValueError where that can't be."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size - 8:
        raise ValueError(f"it has {size} bytes, too few for its header of {length}")
    entries: dict[str, Mapping[str, Any]] = json.loads(file.read(length))
    entries.pop("__metadata__", {})
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]):
        begin, stop = entry["data_offsets"]
        wanted = DTYPES[entry["dtype"]].itemsize * prod(entry["shape"])
        if begin != end or stop - begin != wanted:
            raise ValueError(f"tensor {key} has {stop - begin} bytes at {begin}, not {wanted}")
        end = stop
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes, its tensors end at {8 + length + end}")
    return 8 + length, entries


class TensorReaders:
    """The files of a checkpoint folder, opened when first asked for; closes them together.

    No more than `_OPEN_FILES` are open, since a process may have few: the one used last stays.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, TensorReader] = {}

    def __getitem__(self, name: str) -> TensorReader:
        reader = self._open.pop(name, None) or TensorReader(self._folder / name)
        self._open[name] = reader  # at the end: used last
        if len(self._open) > _OPEN_FILES:
            self._open.pop(next(iter(self._open))).close()
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self._open.values():
            reader.close()


class TensorWriter:
    """One new file, whose tensors are announced first and then written in that order; at the end of
    the `with` block it is on the disk.

    `digest` and `bytes` describe what has been written so far.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        offset, header = 0, {}
        for key, shape in shapes.items():
            size = DTYPES[dtype].itemsize * prod(shape)
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._dtype = DTYPES[dtype]
        self._hash = xxhash.xxh3_128()
        self.bytes = 0
        self._end = 8 + len(text) + offset
        self._file = DirectWriter(path)
        self._put(np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8))

    def write(self, values: Values) -> None:
        """Append the next elements, in row-major order of the tensor that they belong to."""
        if values.dtype != self._dtype:
            raise TypeError(f"the file holds {self._dtype}, not {values.dtype}")
        self._put(np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def _put(self, data: Bytes) -> None:
        self._hash.update(data.data)
        self.bytes += len(data)
        self._file.write(data)

    @property
    def digest(self) -> str:
        """xxh3_128 of the bytes so far, in hexadecimal."""
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close(whole=error is None)
        if error is None and self.bytes != self._end:
            raise ValueError(f"{self._end} bytes were announced, {self.bytes} written")


def stretches(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box into whole rows of `STRETCH_BYTES` or one row, in order."""
    if not box.size:
        yield box
        return
    step = max(1, STRETCH_BYTES // (itemsize * max(1, prod(box.size[1:]))))
    for first in range(0, box.size[0], step):
        count = min(step, box.size[0] - first)
        yield Box((box.offset[0] + first, *box.offset[1:]), (count, *box.size[1:]))


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"can't be read ({error})"
