"""CSV files of a run's curves, a file a tag, written by DeepSpeed's csv monitor.

The monitor only appends; this module sees to it that a resumed run goes on where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_lite.monitoring.scalars import Position, Scalar
from megatron_lite.monitoring.superseded import set_aside

Append = Callable[[Sequence[tuple[str, float, int]]], None]


class CsvWriter:
    """Appends points to `directory/<tag>.csv`, blanks as underscores, columns step and value.

    `connect` makes the writer: it takes the folder and the names, without ending, of the files
    that have their header. Points of an earlier start beyond `start` go to `directory/superseded/`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        start: Position,
        connect: Callable[[Path, list[str]], Append],
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        there = sorted(directory.glob("*.csv"))
        for path in there:
            last = start.last_valid(path.stem.replace("_", " "))
            set_aside(path, directory / "superseded" / path.name, _up_to(last))
        self._append = connect(directory, [p.stem for p in there if p.stat().st_size])

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Appends points; each file is closed again."""
        self._append(list(scalars))

    def close(self) -> None:
        """Nothing is pending."""


def _up_to(last: int) -> Callable[[str], bool]:
    def keep(line: str) -> bool:
        step = line.partition(",")[0]
        return step == "step" or (step.isdecimal() and int(step) <= last)

    return keep
