"""Sets aside what an earlier start of a run logged beyond the checkpoint that is loaded now.

Those steps run again, and a file with both would draw a loop. Nothing is thrown away: the lines go,
byte for byte, to a second file. Used by the writers of metrics.jsonl and of the CSV files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path


def set_aside(path: Path, other: Path, keep: Callable[[str], bool], *, mark: str = "") -> int:
    """Move the lines of `path` that `keep` refuses to the end of `other`; returns their number.

    `mark` is a line put before them. A line without an end, which a killed process left, is moved
    too. Killed in between, lines are in both files and are moved again at the next start.
    """
    if not path.exists():
        return 0
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        # Not splitlines: a text may hold characters that it takes for the end of a line.
        *whole, torn = file.read().split("\n")
    kept = [line for line in whole if keep(line)]
    moved = [line for line in whole if not keep(line)] + ([torn] if torn else [])
    if not moved:
        return 0
    other.parent.mkdir(parents=True, exist_ok=True)
    with other.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.writelines(f"{line}\n" for line in ([mark] if mark else []) + moved)
        file.flush()
        os.fsync(file.fileno())
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    return len(moved)


def set_aside_rows(path: Path, other: Path, *, last_iteration: int) -> int:
    """Move the rows of a metrics.jsonl whose iteration is beyond `last_iteration`.

    A row `{"event": "superseded", "iteration": last_iteration}` comes before them in `other`.
    """

    def keep(line: str) -> bool:
        try:
            return bool(json.loads(line)["iteration"] <= last_iteration)
        except (ValueError, LookupError, TypeError):
            return False

    mark = json.dumps({"event": "superseded", "iteration": last_iteration})
    return set_aside(path, other, keep, mark=mark)
