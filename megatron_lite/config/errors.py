"""What a refused configuration looks like: a `Problem` per fault, one `ConfigError` for all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NO_VALUE = object()
"""Marks a problem that has no value to show: the key is missing."""


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration, told so that it can be mended without reading the source."""

    path: str
    """JSON path such as `model.hidden_size`, or a file name for a fault of the file itself."""

    value: Any
    """The value found there; `NO_VALUE` where none is."""

    rule: str
    """What must hold, with the other numbers that take part."""

    suggestion: str = ""
    """The nearest legal value or the key to use instead; empty where none can be named."""

    origin: str = ""
    """Where the value was written: `file:line`, `--set`, `default` or `derived`."""

    def __str__(self) -> str:
        shown = "" if self.value is NO_VALUE else f" = {show(self.value)}"
        origin = f" [{self.origin}]" if self.origin else ""
        suggestion = f"; {self.suggestion}" if self.suggestion else ""
        return f"{self.path}{shown}: {self.rule}{suggestion}{origin}"


class ConfigError(Exception):
    """A refused configuration: `problems` holds every fault, `str()` lists them, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([f"{head} in the configuration:", *(f"  {p}" for p in self.problems)])


def show(value: Any) -> str:
    """The JSON text of a value, shortened to about one line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 100 else text[:97] + "..."
