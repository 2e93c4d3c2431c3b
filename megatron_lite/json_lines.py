"""Files of one JSON object a line, to which a run adds until it is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def rows_of(text: str) -> Iterator[dict[str, Any]]:
    """The rows of a file's text; what a killed process left of one is passed over."""
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
