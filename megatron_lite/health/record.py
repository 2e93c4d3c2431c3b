"""The file in which one rank leaves word of where it is: RUN_DIR/heartbeats/rank_00003.

Its pages are mapped into the rank's memory: a write is a copy of some bytes, without a system call,
and is there for readers whatever becomes of the process. Written by heartbeat.py and watchdog.py,
read by diagnosis.py.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from struct import Struct

FOLDER = "heartbeats"
GROUPS = ("world", "tensor", "data", "gradient", "pipeline", "model", "embedding")
"""Groups whose collectives are counted, in the order of the counts in a file."""
NOBODY = -1

_FACTS = 1024
_POSITION = Struct("<Qqdq32s128sQ")  # its first number again at the end: see read
_PULSE = Struct(f"<Qdd{len(GROUPS)}qQ")
_PULSE_AT = _FACTS + 256
_SIZE = 2048
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Who writes; fixed while the process lives, but for `groups`."""

    rank: int
    world_size: int
    host: str
    """The machine as it calls itself, to know one's own processes by."""
    pid: int
    born: int = 0
    """When the process began, as processes.birth says: tells it from a later one of its number."""
    node: str = ""
    """What people call the machine, where that is another name."""
    started: float = 0.0
    """Wall time."""
    launch: str = ""
    """Equal for all ranks of one start of the run, another one after a restart if possible."""
    restart: int = 0
    """How many starts a launcher counted before this one."""
    pulse_seconds: float = 1.0
    place: Mapping[str, int] = field(default_factory=dict)
    """Index on each axis of the grid."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Lowest rank of each of GROUPS that this rank belongs to; empty until they are made."""

    @property
    def machine(self) -> str:
        """Its name for people."""
        return self.node or self.host


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where the main thread is, by its own account."""

    changes: int = 0
    """Grows with every change."""
    iteration: int = 0
    """The one in progress or just done; 0 before the first."""
    since: float = 0.0
    """Wall time of the last change."""
    waits_for: int | None = None
    """The rank whose message it awaits."""
    phase: str = ""
    doing: str = ""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What a thread of the process adds now and then, as long as it can."""

    count: int = 0
    time: float = 0.0
    """Wall time; 0 before the first."""
    still: float = 0.0
    """Seconds without movement, as far as the process was running."""
    collectives: tuple[int, ...] = (0,) * len(GROUPS)
    """How many were begun in each of GROUPS."""


@dataclass(frozen=True)
class Record:
    """All that a file says."""

    facts: Facts
    position: Position = field(default_factory=Position)
    pulse: Pulse = field(default_factory=Pulse)


class RecordFile:
    """The writer's side. Replaces what an earlier start of the run left; OSError where it can't."""

    def __init__(self, run_dir: Path, facts: Facts) -> None:
        path = path_of(run_dir, facts.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}")
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # Written, not only made long: a page without its place on a full disk kills who touches it.
        os.write(self._fd, bytes(_SIZE))
        self._map = mmap.mmap(self._fd, _SIZE)
        self.facts(facts)
        new.replace(path)

    def facts(self, facts: Facts) -> None:
        """Say who writes."""
        text = json.dumps(asdict(facts)).encode()
        if len(text) > _FACTS:
            raise ValueError(f"a heartbeat has room for {_FACTS} bytes of facts, not {len(text)}")
        self._map[:_FACTS] = text.ljust(_FACTS)

    def position(
        self, changes: int, iteration: int, since: float, waits_for: int, phase: bytes, doing: bytes
    ) -> None:
        """Say where the main thread is; what is too long is cut."""
        packed = _POSITION.pack(changes, iteration, since, waits_for, phase, doing, changes)
        self._map[_FACTS : _FACTS + _POSITION.size] = packed

    def pulse(self, count: int, time: float, still: float, collectives: Sequence[int]) -> None:
        """Say that the process runs."""
        packed = _PULSE.pack(count, time, still, *collectives, count)
        self._map[_PULSE_AT : _PULSE_AT + _PULSE.size] = packed

    def sync(self) -> None:
        """Let readers on other machines see it; waits for the disk, but holds no lock of Python."""
        os.fsync(self._fd)


def path_of(run_dir: Path, rank: int) -> Path:
    """Where a rank writes."""
    return run_dir / FOLDER / f"rank_{rank:05d}"


def read(path: Path) -> Record:
    """What a file says; ValueError where it is none, OSError where it can't be read."""
    for _ in range(_TRIES):
        data = path.read_bytes()
        if len(data) != _SIZE:
            raise ValueError(f"{path}: no heartbeat: {len(data)} bytes instead of {_SIZE}")
        position = _POSITION.unpack_from(data, _FACTS)
        pulse = _PULSE.unpack_from(data, _PULSE_AT)
        if position[0] == position[-1] and pulse[0] == pulse[-1]:
            break  # else it was read while being written; stopped there, it stays so
    changes, iteration, since, waits_for, phase, doing, _ = position
    count, time, still, *collectives, _ = pulse
    try:
        facts = Facts(**json.loads(data[:_FACTS]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: no heartbeat: {error}") from error
    return Record(
        facts,
        Position(
            changes=changes,
            iteration=iteration,
            since=since,
            waits_for=None if waits_for == NOBODY else waits_for,
            phase=_text(phase),
            doing=_text(doing),
        ),
        Pulse(count=count, time=time, still=still, collectives=tuple(collectives)),
    )


def spans(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return f"rank{'s' * (len(ordered) != 1)} {', '.join(texts)}"


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
