"""An input file as a stream of bytes, whatever it is packed with; damage has its own error.

Called by jsonl and blocks.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import zstandard

from megatron_lite.data.errors import DataError

_READ = 1 << 16  # packed bytes a step; bounds what one step unpacks to


class _Zstandard(io.RawIOBase):
    """Frames one after the other; a stream that ends within a frame is an EOFError."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._fed = False  # whether the frame has begun
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(_READ)
            if not self._packed:
                if self._fed:
                    raise EOFError("the data ends within a frame")
                return 0
            self._ready = memoryview(self._frame.decompress(self._packed))
            self._fed, self._packed = True, b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._fed = False
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def packing(path: str | Path) -> str | None:
    """Return how a file is packed, by its name: "gzip", "zstandard" or None."""
    return {".gz": "gzip", ".zst": "zstandard"}.get(Path(path).suffix)


@contextmanager
def open_stream(
    path: str | Path, *, reached: Callable[[], str]
) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file; gives the unpacked bytes, and how many bytes of the file have been read.

    `reached` says in an error how far the reader had come. DataError for a file that can't be read
    or is damaged. A named pipe always stands at 0.
    """
    kind = packing(path)
    try:
        with Path(path).open("rb") as raw:
            file: Any = raw
            if kind == "gzip":
                file = gzip.GzipFile(fileobj=raw)
            elif kind == "zstandard":
                file = io.BufferedReader(_Zstandard(raw), buffer_size=1 << 20)
            yield file, (raw.tell if raw.seekable() else lambda: 0)
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise DataError(
            f"{path}: damaged {kind} data after {reached()}: {error}; fetch or pack the file again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error
