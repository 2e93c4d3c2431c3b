"""Large files written and read past the page cache, from their beginning to their end.

A checkpoint is larger than what is worth keeping in the page cache, and getting pages for it costs
more time than the disk does. Reading past it also shows what lies on the disk. File systems without
O_DIRECT (tmpfs) are used in the ordinary way.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from errno import EINVAL
from pathlib import Path

import numpy as np
import numpy.typing as npt

THREADS = min(8, 2 * (os.cpu_count() or 1))
"""How many read or write files at a time: two a core, since one waits for the disk in turn."""
_BUFFER_BYTES = 1 << 22
_DIRECT = getattr(os, "O_DIRECT", 0)
Bytes = npt.NDArray[np.uint8]


class DirectWriter:
    """A new file; after `close` it is on the disk."""

    def __init__(self, path: Path) -> None:
        self._file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._buffer = _aligned()
        self._filled = 0

    def write(self, data: Bytes) -> None:
        """Append bytes."""
        while len(data):
            count = min(len(data), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == len(self._buffer):
                self._flush()

    def _flush(self) -> None:
        rest = self._buffer[: self._filled].data
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except OSError as error:
                if error.errno != EINVAL or not _is_direct(self._file):
                    raise
                _undirect(self._file)  # the file system wants another alignment
        self._filled = 0

    def close(self, *, whole: bool = True) -> None:
        """Write what is left and sync; with `whole` false only close."""
        try:
            if whole:
                _undirect(self._file)  # the end of a file has no alignment
                self._flush()
                os.fsync(self._file)
        finally:
            os.close(self._file)


class DirectReader:
    """A file as a stream of bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path, os.O_RDONLY)
        self._buffer = _aligned()
        self._position = self._begin = self._end = 0

    def read_into(self, out: Bytes) -> int:
        """Fill `out` with the next bytes; returns how many there were."""
        done = 0
        while done < len(out):
            if self._begin == self._end and not self._fill():
                break
            count = min(len(out) - done, self._end - self._begin)
            out[done : done + count] = self._buffer[self._begin : self._begin + count]
            self._begin += count
            done += count
        return done

    def _fill(self) -> bool:
        try:
            count = os.preadv(self._file, [self._buffer.data], self._position)
        except OSError as error:
            if error.errno != EINVAL or not _is_direct(self._file):
                raise
            _undirect(self._file)
            return self._fill()
        if count % mmap.PAGESIZE:  # the end, or another block size
            _undirect(self._file)
        self._position += count
        self._begin, self._end = 0, count
        return count > 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _aligned() -> Bytes:
    """A buffer at a page's beginning, as O_DIRECT wants it."""
    return np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), dtype=np.uint8)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def _undirect(file: int) -> None:
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)
