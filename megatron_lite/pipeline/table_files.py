"""Schedules that users write: JSON and CSV files ↔ tables of actions.

Reads, says where a file is wrong, and has verify.py judge the table. The format is described in
README.md. Called by build_schedule for a `parallel.pipeline_schedule` that is a path.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError
from megatron_lite.pipeline.verify import verify

SUFFIXES = (".json", ".csv")
_ACTION = re.compile(r"([FBW])([0-9]{1,9})\.([0-9]{1,9})")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_LABELS = ("micro-batches", "placement", "directions", "rank")


@dataclass(frozen=True)
class _Parts:
    """What a file says, before its actions are understood."""

    num_microbatches: int
    placements: tuple[tuple[int, ...], ...]
    directions: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]


def is_table_file(name: str) -> bool:
    """Whether a schedule's name is the path of a table."""
    return name.endswith(SUFFIXES)


def read_table(path: str | Path) -> Schedule:
    """The schedule in a file, checked by `verify`.

    Raises ScheduleError that begins with the path and names rank, position and text of what is
    wrong, or the verifier's reason.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a spreadsheet's export has a mark
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path}: not UTF-8 text: {error}") from error
    return _understood(str(path), text)


@lru_cache(maxsize=2)
def _understood(path: str, text: str) -> Schedule:
    """The schedule that a text says, remembered: each rule of a config asks for it anew."""
    try:
        parts = _from_json(text) if path.endswith(".json") else _from_csv(text)
        rows = tuple(
            tuple(_action(text, f"rank {rank}, action {i}") for i, text in enumerate(row))
            for rank, row in enumerate(parts.rows)
        )
    except RecursionError as error:
        raise ScheduleError(f"{path}: has too many lists, one in the other") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    schedule = Schedule(
        name=path,
        num_stages=len(parts.placements[0]),
        num_ranks=len(rows),
        num_microbatches=parts.num_microbatches,
        placements=parts.placements,
        directions=parts.directions,
        actions=rows,
        split_backward=any(action.kind == "W" for row in rows for action in row),
    )
    verify(schedule)
    return schedule


def table_as_json(schedule: Schedule) -> str:
    """The text of a JSON file that read_table reads as `schedule`; a line for each rank."""
    head = {
        "micro_batches": schedule.num_microbatches,
        "placements": schedule.placements,
        "directions": schedule.directions,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = ",\n".join(
        "    " + json.dumps(" ".join(_text(action) for action in row)) for row in schedule.actions
    )
    return "{\n" + ",\n".join(lines) + ',\n  "actions": [\n' + rows + "\n  ]\n}\n"


def table_as_csv(schedule: Schedule) -> str:
    """The text of a CSV file that read_table reads as `schedule`; a line for each rank."""
    rows = [
        ("micro-batches", schedule.num_microbatches),
        *(("placement", *placement) for placement in schedule.placements),
        ("directions", *schedule.directions),
        *(("rank", *map(_text, row)) for row in schedule.actions),
    ]
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def _text(action: Action) -> str:
    return f"{action.kind}{action.stage}.{action.micro_batch}"


def _action(text: str, where: str) -> Action:
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"{where}: {_short(repr(text))} is not an action; F0.3 is the forward of stage 0 for"
            " micro-batch 3, B its backward, W its weights' gradient where B leaves that out"
        )
    kind, stage, micro_batch = found.groups()
    return Action(kind, int(stage), int(micro_batch))  # type: ignore[arg-type]


def _from_json(text: str) -> _Parts:
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_int=_number)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(found, dict):
        raise ScheduleError("must be an object with micro_batches, placements and actions")
    needed, known = ("micro_batches", "placements", "actions"), ("directions", "note")
    if missing := [key for key in needed if key not in found]:
        raise ScheduleError(f"lacks {', '.join(missing)}")
    if unknown := sorted(found.keys() - {*needed, *known}):
        raise ScheduleError(f"has unknown keys: {', '.join(unknown)}")
    count = _whole(found["micro_batches"], "micro_batches")
    placements = [
        _wholes(placement, f"placements[{i}]")
        for i, placement in enumerate(_list(found["placements"], "placements"))
    ]
    directions = found.get("directions")
    rows = [
        row.split() if isinstance(row, str) else [str(cell) for cell in _list(row, f"actions[{i}]")]
        for i, row in enumerate(_list(found["actions"], "actions"))
    ]
    return _parts(
        count, placements, None if directions is None else _wholes(directions, "directions"), rows
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ScheduleError("gives a key twice")
    return found


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ScheduleError(f"a number of {len(text)} digits is none of a table")
    return int(text)


def _from_csv(text: str) -> _Parts:
    """Lines that begin with what they hold; empty cells are idle time and mean nothing."""
    found: dict[str, list[list[str]]] = {label: [] for label in _LABELS}
    for number, label, cells in _csv_lines(text):
        if label not in found:
            raise ScheduleError(
                f"line {number} begins with {_short(repr(label))};"
                f" lines begin with {', '.join(_LABELS)}"
            )
        if label in ("micro-batches", "directions") and found[label]:
            raise ScheduleError(f"line {number}: a second line of {label}")
        found[label].append(cells)
    counts = found["micro-batches"]
    if not counts or len(counts[0]) != 1:
        raise ScheduleError("needs a line micro-batches with one number")
    directions = found["directions"]
    return _parts(
        _cell(counts[0][0], "micro-batches"),
        [[_cell(cell, "placement") for cell in line] for line in found["placement"]],
        [_cell(cell, "directions") for cell in directions[0]] if directions else None,
        found["rank"],
    )


def _csv_lines(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Number, label and cells of each line that says something."""
    lines = csv.reader(text.splitlines(), strict=True)
    try:
        for line in lines:
            label, *cells = [cell.strip() for cell in line] or [""]
            if label or any(cells):
                yield lines.line_num, label, [cell for cell in cells if cell]
    except csv.Error as error:
        where = f"line {lines.line_num}: {error}"
        raise ScheduleError(f"{where}; a table needs no quotation marks") from error


def _parts(
    count: int,
    placements: Sequence[Sequence[int]],
    directions: Sequence[int] | None,
    rows: Sequence[Sequence[str]],
) -> _Parts:
    if not placements or not placements[0]:
        raise ScheduleError("needs a placement: the rank of each stage")
    if count > (actions := sum(map(len, rows))):
        raise ScheduleError(f"is for {count} micro-batches, but has only {actions} actions")
    if directions is None:
        if len(placements) > 1:
            raise ScheduleError(
                "needs directions, the number of its placement for each micro-batch,"
                f" as there are {len(placements)} placements"
            )
        directions = (0,) * count
    return _Parts(
        count,
        tuple(tuple(placement) for placement in placements),
        tuple(directions),
        tuple(tuple(row) for row in rows),
    )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ScheduleError(f"{where} must be a list, not {_short(json.dumps(value))}")
    return value


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ScheduleError(f"{where} must be a whole number, not {_short(json.dumps(value))}")
    return value


def _wholes(value: Any, where: str) -> list[int]:
    return [_whole(one, f"{where}[{i}]") for i, one in enumerate(_list(value, where))]


def _cell(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ScheduleError(f"{where} must be whole numbers, not {_short(repr(text))}")
    return _number(text)


def _short(text: str) -> str:
    """What an error quotes of the file; a stray quotation mark makes a cell of half of it."""
    return text if len(text) <= 60 else text[:60] + "…"
