"""An input cut into blocks, the pieces that workers encode, and a block read into records.

The cut depends on the input alone, never on the number of workers. A block of an unpacked file is
only a range: whoever encodes it reads it. Columns (Parquet, Arrow, data sets) are in columnar.
Called by preprocess, encoding and the training of tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import orjson

from megatron_lite.data.errors import DataError
from megatron_lite.data.inputs import Source
from megatron_lite.data.jsonl import BYTE_ORDER_MARK, LineError, parse_odd_record, parse_record
from megatron_lite.data.streams import open_stream, packing

BLOCK_BYTES = 1 << 20
LARGEST_DOCUMENT = 1 << 26  # bytes of a text file that is one document
_PROBE = 1 << 14  # bytes read at a time in search of a line's end
_TEXT = "text"  # the field that the documents of plain text have


class Place(NamedTuple):
    """Where a block lies."""

    path: str
    source: int
    """Index of the input file."""
    number: int
    """Index of the block in that file."""
    position: int
    """Bytes of the file up to the block's end."""
    unit: str
    """What is counted in the file: "line" or "record"."""


Record = tuple[int, dict[str, Any] | LineError, bool]
"""A record of a block: its line or record, from 1; its content; whether it is known to be free of
lone surrogates. A plain tuple, because there are many."""


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file, as bytes or as the range [start, stop) of the file."""

    place: Place
    format: str
    data: bytes | None = None
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        return f"{self.place.path}, block {self.place.number}"

    def load(self) -> bytes:
        """Return the bytes: of a range the lines that begin in it."""
        if self.data is not None:
            return self.data
        return _read_range(self.place.path, self.start, self.stop)


def read_blocks(
    source: Source, index: int, keys: Sequence[str], *, size: int = BLOCK_BYTES, skip: int = 0
) -> Iterator[Block]:
    """Yield the blocks of a file after the first `skip`, each of about `size` bytes.

    `keys` are the columns to take where a file has columns.
    """
    if source.format in ("parquet", "arrow", "dataset"):
        from megatron_lite.data.columnar import column_blocks  # slow imports, only when needed

        yield from islice(column_blocks(source, index, keys, size=size), skip, None)
    elif source.format == "text":
        yield from islice(_whole_file(source, index), skip, None)
    elif source.regular and not packing(source.path):
        for number, start in islice(enumerate(range(0, source.size, size)), skip, None):
            stop = min(start + size, source.size)
            place = Place(source.path, index, number, stop, "line")
            yield Block(place, source.format, start=start, stop=stop)
    else:
        yield from islice(_stream(source, index, size), skip, None)


def read_records(format: str, data: bytes) -> tuple[Iterator[Record], int]:
    """Return the records of a block's bytes, and how many lines or records it spans."""
    if format == "jsonl":
        return _json_lines(data), _lines(data)
    if format == "text-lines":
        return _text_lines(data), _lines(data)
    if format == "text":
        return iter([(1, _text(data), True)]), 1
    from megatron_lite.data.columnar import table_records

    return table_records(data)


def _lines(data: bytes) -> int:
    """Return the number of lines: none where a long line leaves nothing to begin in a block."""
    return data.count(b"\n") + (data != b"" and not data.endswith(b"\n"))


def _json_lines(data: bytes) -> Iterator[Record]:
    loads = orjson.loads
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line or line.isspace():
            continue
        try:
            content = loads(line)
        except orjson.JSONDecodeError:
            yield number, _attempt(parse_odd_record, line), False
            continue
        yield number, content if type(content) is dict else _attempt(parse_record, line), True


def _attempt(parse: Callable[[bytes], dict[str, Any]], line: bytes) -> dict[str, Any] | LineError:
    try:
        return parse(line)
    except LineError as error:
        return error


def _text_lines(data: bytes) -> Iterator[Record]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line and not line.isspace():
            yield number, _text(line.removesuffix(b"\r")), True


def _text(data: bytes) -> dict[str, Any] | LineError:
    try:
        return {_TEXT: data.decode("utf-8")}
    except UnicodeDecodeError as error:
        return LineError(
            f"invalid UTF-8: byte 0x{data[error.start]:02x} at position {error.start + 1}"
        )


def _read_range(path: str, start: int, stop: int) -> bytes:
    """Return the whole lines whose first byte lies in [start, stop)."""
    with Path(path).open("rb", buffering=0) as file:
        first = _line_start(file, start)
        size = _line_start(file, stop) - first
        file.seek(first)
        data = file.read(size)
        while len(data) < size:  # a system call may return less
            data += file.read(size - len(data)) or _shrunk(path)
    return data if start else data.removeprefix(BYTE_ORDER_MARK)


def _shrunk(path: str) -> NoReturn:
    raise DataError(f"{path}: became shorter while it was read; start again when it is at rest")


def _line_start(file: IO[bytes], offset: int) -> int:
    """Return where the first line begins that doesn't begin before the offset."""
    if offset == 0:
        return 0
    offset -= 1  # the byte before tells whether a line begins at the offset itself
    file.seek(offset)
    while data := file.read(_PROBE):
        if (end := data.find(b"\n")) >= 0:
            return offset + end + 1
        offset += len(data)
    return offset


def _stream(source: Source, index: int, size: int) -> Iterator[Block]:
    """Yield the blocks of a file that must be read from its beginning."""
    lines = number = 0
    with open_stream(source.path, reached=lambda: f"line {lines}") as (file, position):
        while data := file.read(size):
            if not data.endswith(b"\n"):
                data += file.readline()
            lines += data.count(b"\n")
            if not number:
                data = data.removeprefix(BYTE_ORDER_MARK)
            place = Place(source.path, index, number, position(), "line")
            yield Block(place, source.format, data)
            number += 1


def _whole_file(source: Source, index: int) -> Iterator[Block]:
    """Yield a text file as one document."""
    with open_stream(source.path, reached=lambda: "an unknown line") as (file, position):
        data = file.read(LARGEST_DOCUMENT + 1)
        if len(data) > LARGEST_DOCUMENT:
            raise DataError(
                f"{source.path}: longer than {LARGEST_DOCUMENT >> 20} MiB, too long for one "
                f"document; --text-documents line makes each of its lines a document"
            )
        place = Place(source.path, index, 0, position(), "document")
        yield Block(place, source.format, data.removeprefix(BYTE_ORDER_MARK))
