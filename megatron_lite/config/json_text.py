"""JSON text to values and the line of every key, so that a fault can be pointed at.

Stricter than the standard library in one thing: a key given twice is a problem. Which keys may
stand where is none of its business. Called by `compose`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config.errors import NO_VALUE, ConfigError, Problem

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass
class Document:
    """A parsed JSON text."""

    value: Any
    lines: dict[str, int] = field(default_factory=dict)
    """JSON path of each key to the line it stands on, counted from 1."""
    problems: list[Problem] = field(default_factory=list)
    """Keys given twice."""


def parse(text: str, source: str) -> Document:
    """Parse `text`; `source` (a file's name) only serves the messages.

    Raises:
        ConfigError: the text is not JSON; names line and column.
    """
    try:
        document = Document(json.loads(text))
    except json.JSONDecodeError as error:
        place = f"{source}:{error.lineno}:{error.colno}"
        problem = Problem(place, NO_VALUE, f"is not JSON: {error.msg}", _hint(text, error.pos))
        raise ConfigError([problem]) from None
    _Walk(text, source, document).value("")
    return document


def join(path: str, key: str) -> str:
    """The JSON path of `key` in the object at `path`; the outermost object has the empty path."""
    return f"{path}.{key}" if path else key


def _hint(text: str, position: int) -> str:
    rest = text[position:].lstrip()
    if rest.startswith(("//", "/*", "#")):
        return 'JSON has no comments: write "_note": "..." instead'
    if text[:position].rstrip().endswith(","):
        return "remove the comma before it"
    if rest.startswith("'"):
        return "use double quotes"
    return ""


class _Walk:
    """Goes once more over a text that is known to be JSON and notes where its keys stand."""

    def __init__(self, text: str, source: str, document: Document) -> None:
        self._text, self._source, self._document = text, source, document
        self._tokens = list(_TOKEN.finditer(text))
        self._next = 0
        self._line, self._counted = 1, 0

    def value(self, path: str) -> None:
        token = self._take()
        if token == "{":
            self._object(path)
        elif token == "[":
            self._array(path)

    def _object(self, path: str) -> None:
        seen: dict[str, int] = {}
        while (token := self._take()) != "}":
            if token == ",":
                continue
            key, line = json.loads(token), self._line_of_last()
            place = join(path, key)
            if key in seen:
                rule = f"is given twice, on lines {seen[key]} and {line} of {self._source}"
                self._document.problems.append(Problem(place, NO_VALUE, rule, "keep one of them"))
            seen.setdefault(key, line)
            self._document.lines[place] = line
            self._take()  # the colon
            self.value(place)

    def _array(self, path: str) -> None:
        index = 0
        while self._peek() != "]":
            if self._peek() == ",":
                self._take()
                continue
            self.value(f"{path}[{index}]")
            index += 1
        self._take()

    def _peek(self) -> str:
        return self._tokens[self._next].group()

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1].group()

    def _line_of_last(self) -> int:
        start = self._tokens[self._next - 1].start()
        self._line += self._text.count("\n", self._counted, start)
        self._counted = start
        return self._line
