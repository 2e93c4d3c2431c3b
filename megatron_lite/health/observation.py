"""What can be seen of a run's ranks from outside, in their heartbeats and on this machine.

Reads only; no clock of another machine is trusted: what beats is what changes while one looks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.health import processes
from megatron_lite.health.record import FOLDER, Record, path_of, read

FROZEN_AFTER = 7.0
"""Seconds, and three beats more, after which a rank that does not beat is taken for frozen."""
_POLL = 0.5


@dataclass(frozen=True)
class Seen:
    """One rank."""

    record: Record
    beats: bool
    """Its heartbeat beat while we looked; a process that was seen to be stopped can't."""
    state: str | None
    """Of the process, see processes.state; None where it is not on this machine."""

    @property
    def ended(self) -> bool:
        """Whether it left in order."""
        return self.record.position.phase == "ended"

    @property
    def gone(self) -> bool:
        """Whether it is known to have left without a word."""
        return self.state in ("", "Z") and not self.ended

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP or a debugger holds it."""
        return self.state in processes.STOPPED


@dataclass(frozen=True)
class Observation:
    """All ranks of the newest start of a run."""

    world_size: int
    ranks: Mapping[int, Seen]
    """Those that left a heartbeat in this start."""

    @property
    def missing(self) -> list[int]:
        """The others."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]


def records(run_dir: Path) -> dict[int, Record]:
    """The heartbeats of the newest start, by rank; {} where there is none.

    ValueError where a file is no heartbeat. What an earlier start left of ranks that have not come
    up yet, or that the present one does not have, is left out.
    """
    found = {}
    for path in sorted((run_dir / FOLDER).glob("rank_*")):
        record = read(path)
        found[record.facts.rank] = record
    if not found:
        return {}
    newest = max(found.values(), key=lambda record: record.facts.started).facts
    return {
        rank: record
        for rank, record in found.items()
        if record.facts.launch == newest.launch and rank < newest.world_size
    }


def observe(run_dir: Path, *, sleep: Callable[[float], None] = time.sleep) -> Observation:
    """Look at a run until every rank has beaten or is known not to: seconds at most, see
    FROZEN_AFTER. ValueError where there are no heartbeats, or where a file is none."""
    first = records(run_dir)
    if not first:
        raise ValueError(f"{run_dir / FOLDER}: no heartbeats: no run has started here")
    one = next(iter(first.values())).facts
    looks = 1 + round((FROZEN_AFTER + 3 * one.pulse_seconds) / _POLL)
    ranks = {rank: Seen(record, False, _state(record)) for rank, record in first.items()}
    for _ in range(looks):
        waited_for = [
            r for r, s in ranks.items() if not (s.beats or s.ended or s.gone or s.stopped)
        ]
        if not waited_for:
            break
        sleep(_POLL)
        for rank in waited_for:
            record = read(path_of(run_dir, rank))
            ranks[rank] = Seen(record, record.pulse != first[rank].pulse, _state(record))
    # Once more, now that it is known who beats: what they say belongs to one moment.
    last = records(run_dir)
    return Observation(
        one.world_size,
        {rank: replace(s, record=last.get(rank, s.record)) for rank, s in ranks.items()},
    )


def _state(record: Record) -> str | None:
    """Of the process that wrote it; "" where another one has its number now."""
    facts = record.facts
    if facts.host != socket.gethostname():
        return None
    born = processes.birth(facts.pid)
    if born and facts.born and born != facts.born:
        return ""
    return processes.state(facts.pid)
