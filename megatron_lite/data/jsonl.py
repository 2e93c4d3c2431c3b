"""JSON-lines input, plain or gzipped: lines with their numbers, records, text fields.

A line ends at a line feed and nowhere else, so U+2028 inside a text splits nothing. Called by
preprocess and sentencepiece_training.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_lite.data.errors import DataError

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_NAMES = {list: "an array", str: "a text", bool: "a truth value", dict: "an object"}


class LineError(Exception):
    """What is wrong with one line or field; the caller adds file and line number."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive whole lines of one file."""

    path: str
    first_line: int
    """Number of the first line, counted from 1."""
    lines: list[bytes]
    position: int
    """Bytes of the file on disk read so far; 0 for a named pipe."""

    def __str__(self) -> str:
        last = self.first_line + len(self.lines) - 1
        return f"{self.path} lines {self.first_line} to {last}"


def read_chunks(path: str | Path, *, chunk_bytes: int = 1 << 18) -> Iterator[Chunk]:
    """Yield the lines of a .jsonl or .jsonl.gz file in chunks of about chunk_bytes.

    A byte-order mark at the file's start is dropped. DataError for a file that can't be read or is
    damaged, with the line reached.
    """
    number = 1
    try:
        with Path(path).open("rb") as raw:
            packed = str(path).endswith(".gz")
            file: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            while lines := file.readlines(chunk_bytes):
                if number == 1:
                    lines[0] = lines[0].removeprefix(_BOM)
                position = raw.tell() if raw.seekable() else 0
                yield Chunk(str(path), number, lines, position)
                number += len(lines)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: damaged gzip data after line {number - 1}: {error}; fetch or pack the file "
            f"again"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the object of one line; LineError with the reason when the line isn't one object."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(
            f"invalid UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}"
        ) from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise LineError(f"more than one JSON value (column {error.colno})") from error
        raise LineError(
            f"not a whole JSON object ({error.msg}, column {error.colno}); each object must be on "
            f"one line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise LineError(f"JSON that can't be read: {error}") from error
    if not isinstance(record, dict):
        raise LineError(f"{_name(record)} instead of a JSON object")
    return record


def text_field(record: dict[str, Any], key: str) -> str | None:
    """Return the text under `key`, None when missing or null; LineError for another type."""
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise LineError(f"field {key!r} is {_name(value)}, not a text")
    return value


def replace_surrogates(text: str) -> tuple[str, int]:
    """Return the text with lone surrogates, which UTF-8 can't hold, as U+FFFD, and their number."""
    return _SURROGATE.subn("\ufffd", text)


def _name(value: Any) -> str:
    return "null" if value is None else _JSON_NAMES.get(type(value), "a number")
