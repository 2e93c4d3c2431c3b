"""Diagnosis: which rank the others wait for. Pure: from an observation to an answer.

A rank waits for another one whose message it awaits, or that has begun fewer collectives in a group
of both. Who waits for nobody and is waited for is where a run hangs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_lite.health.heartbeat import PHASES
from megatron_lite.health.observation import Observation, Seen
from megatron_lite.health.record import GROUPS, Record, spans

MOVES_WITHIN = 30.0
"""Seconds without movement that are nothing to worry about."""
_SENTENCES = 8


@dataclass(frozen=True)
class Lag:
    """A rank that holds up others."""

    rank: int
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """What is the matter with a run."""

    lagging: tuple[Lag, ...] = ()
    """Lowest rank first."""
    hangs: bool = False
    """Nothing has moved for a while, whoever may be the cause."""
    silent: bool = False
    """No rank's heartbeat beats: they are gone, or hang in C code, every one of them."""
    waits: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """For whom each rank waits."""

    def waiting_for(self, rank: int) -> list[int]:
        """The ranks that wait for this one, also by way of others."""
        found: set[int] = set()
        new = {rank}
        while new:
            new = {r for r, targets in self.waits.items() if targets & new} - found - {rank}
            found |= new
        return sorted(found)


def diagnose(seen: Observation, *, moves_within: float = MOVES_WITHIN) -> Diagnosis:
    """Name the ranks that hold up the others.

    A process that is gone or frozen is one in any case; others only where every rank has stood
    still for `moves_within` seconds.
    """
    waits = wait_graph({rank: one.record for rank, one in seen.ranks.items()})
    there = {rank: one for rank, one in seen.ranks.items() if not one.ended}
    alive = [one for one in there.values() if one.beats]
    hangs = all(one.record.pulse.still >= moves_within for one in alive)
    if not alive:
        hangs = any(not one.gone for one in there.values())
    broken = [Lag(rank, why) for rank, one in there.items() if (why := _broken(one))]
    if len(broken) == len(there):  # that no heart beats says nothing of any of them
        broken = [Lag(rank, why) for rank, one in there.items() if (why := _gone_or_held(one))]
    if all(one.gone for one in there.values()):
        broken = []
    # Ranks do not come up at the same moment.
    absent = [Lag(r, "has left no heartbeat in this start") for r in seen.missing if hangs]
    lagging = sorted([*broken, *absent], key=lambda lag: lag.rank)
    if hangs and not lagging:
        lagging = _last(seen, waits)
    return Diagnosis(tuple(lagging), hangs, bool(there) and not alive, waits)


def wait_graph(records: Mapping[int, Record]) -> dict[int, frozenset[int]]:
    """For whom each rank waits, or would, if nothing moved any more."""
    waits: dict[int, set[int]] = {rank: set() for rank in records}
    for rank, record in records.items():
        if record.position.waits_for in records:
            waits[rank].add(record.position.waits_for)  # type: ignore[arg-type]
    for index, name in enumerate(GROUPS):
        groups: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, record in records.items():
            first = record.facts.groups.get(name)
            if first is not None:
                groups[first][rank] = record.pulse.collectives[index]
        for begun in groups.values():
            fewest = min(begun.values())
            behind = {rank for rank, count in begun.items() if count == fewest}
            for rank, count in begun.items():
                if count > fewest:
                    waits[rank] |= behind
    return {rank: frozenset(targets) for rank, targets in waits.items()}


def _gone_or_held(one: Seen) -> str:
    if one.gone:
        return "its process is gone"
    return "its process is stopped (SIGSTOP or a debugger)" if one.stopped else ""


def _broken(one: Seen) -> str:
    if one.gone or one.stopped or one.beats:
        return _gone_or_held(one)
    if one.state == "D":
        return "its process waits for a disk or a device (state D)"
    return (
        "its heartbeat stopped: the process is stopped, or holds Python's lock in C code, or its "
        "machine is gone"
    )


def _last(seen: Observation, waits: Mapping[int, frozenset[int]]) -> list[Lag]:
    """Who holds up the others where all processes are well; [] where nobody is behind."""
    awaited = set().union(*waits.values())
    if last := sorted(rank for rank in awaited if not waits[rank]):
        return [Lag(rank, "the others wait for it") for rank in last]
    if awaited:
        # In a circle, a collective may go on by itself, a message does not.
        circle = [r for r in sorted(awaited) if seen.ranks[r].record.position.waits_for is None]
        why = "it waits for ranks that wait for it"
        return [Lag(rank, why) for rank in circle or sorted(awaited)]
    places = {rank: _place(one.record) for rank, one in seen.ranks.items()}
    first = min(places.values())
    behind = [rank for rank, place in places.items() if place == first]
    if len(places) == 1:
        return [Lag(behind[0], _broken(seen.ranks[behind[0]]) or "nothing moves")]
    if len(behind) == len(places):
        return []
    return [Lag(rank, "it is behind the others") for rank in behind]


def _place(record: Record) -> tuple[int, int]:
    phase = record.position.phase
    return record.position.iteration, PHASES.index(phase) if phase in PHASES else len(PHASES)


def describe(found: Diagnosis, seen: Observation) -> list[str]:
    """The answer in sentences: one for each lagging rank, one where there is none."""
    if not found.lagging and not found.hangs:
        return ["all processes are gone" if found.silent else "no rank lags"]
    if not found.lagging:
        places = {_where(one.record) for one in seen.ranks.values()}
        where = places.pop() if len(places) == 1 else "their collectives"
        return [f"nothing moves, and no rank is behind: all {len(seen.ranks)} are in {where}"]
    told = [_sentence(lag, found, seen.ranks.get(lag.rank)) for lag in found.lagging[:_SENTENCES]]
    if rest := [lag.rank for lag in found.lagging[_SENTENCES:]]:
        told.append(f"so do {spans(rest)}")
    return told


def _sentence(lag: Lag, found: Diagnosis, one: Seen | None) -> str:
    if one is None:
        return f"rank {lag.rank} {lag.why}"
    facts, since = one.record.facts, one.record.position.since
    place = ", ".join(f"{axis} {index}" for axis, index in facts.place.items())
    waiting = found.waiting_for(lag.rank)
    awaited = f"; {spans(waiting)} wait{'s' * (len(waiting) == 1)} for it" if waiting else ""
    return (
        f"rank {lag.rank} on {facts.machine} (process {facts.pid}{f'; {place}' if place else ''}) "
        f"lags: {lag.why}; since {clock(since)} in {_where(one.record)}{awaited}"
    )


def _where(record: Record) -> str:
    position = record.position
    doing = f": {position.doing}" if position.doing else ""
    awaited = "" if position.waits_for is None else f", for which rank {position.waits_for} must "
    return (
        f"{position.phase} of iteration {position.iteration}{doing}"
        f"{awaited and awaited + 'send a message'}"
    )


def clock(seconds: float) -> str:
    """A moment of this day, on this machine's clock."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
