"""JSON-lines input, plain or packed: lines with their numbers, records, text fields.

A line ends at a line feed and nowhere else, so U+2028 inside a text splits nothing. Called by
preprocess and sentencepiece_training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from megatron_lite.data.streams import open_stream

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
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
    """Yield the lines of a .jsonl, .jsonl.gz or .jsonl.zst file in chunks of about chunk_bytes.

    A byte-order mark at the file's start is dropped. DataError for a file that can't be read or is
    damaged, with the line reached.
    """
    number = 1
    with open_stream(path, reached=lambda: f"line {number - 1}") as (file, position):
        while lines := file.readlines(chunk_bytes):
            if number == 1:
                lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            yield Chunk(str(path), number, lines, position())
            number += len(lines)


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the object of one line; LineError with the reason when the line isn't one object."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return parse_odd_record(line)
    if not isinstance(record, dict):
        raise LineError(f"{_name(record)} instead of a JSON object")
    return record


def parse_odd_record(line: bytes) -> dict[str, Any]:
    """Do what parse_record does, slowly: it also takes lone surrogates, NaN and long integers.

    What the fast parser refuses comes here, so all reasons are told in one way.
    """
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
