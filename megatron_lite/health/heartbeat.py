"""Heartbeat: where one rank is, as it says itself; called at every turn of the training loop.

A call costs about a microsecond: it copies some bytes into a mapped file (record.py). That they
get to other machines, and what is to be done where nothing moves, is watchdog.py's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megatron_lite.health.record import GROUPS, NOBODY, Facts, RecordFile

PHASES = (
    "start-up",
    "loading",
    "waiting for data",
    "forward-backward",
    "optimizer step",
    "replay",
    "logging",
    "evaluation",
    "save",
    "trace",
    "ended",
)
"""In the order in which a run comes to them."""
ALONE = ("start-up", "loading", "save", "trace")
"""Phases in which a process works for minutes without a word."""


@dataclass(frozen=True)
class Counted:
    """A process group as a heartbeat sees it."""

    first: int
    """Lowest rank of it, which names it."""
    begun: Callable[[], int]
    """How many collectives this rank has begun in it."""


class Heartbeat:
    """Without a file it tells nobody: for parts of a run, in tests."""

    def __init__(self, file: RecordFile | None = None, facts: Facts | None = None) -> None:
        self.file, self._facts = file, facts
        self.phase, self.iteration, self.changes = PHASES[0], 0, 0
        self.first_iteration: int | None = None
        """The first one of this start, in which much is compiled and allocated."""
        self._groups: dict[str, Counted] = {}
        self._texts: dict[object, bytes] = {}
        self.at(self.phase)

    def at(self, phase: str, doing: object = "", *, iteration: int | None = None) -> None:
        """The main thread enters one of PHASES; `iteration` is the one that begins."""
        self.phase = phase
        if iteration is not None:
            self.iteration = iteration
            if self.first_iteration is None:
                self.first_iteration = iteration
        self.doing(doing)

    def doing(self, what: object, *, waits_for: int = NOBODY) -> None:
        """It begins something (whose text is wanted once, and kept), or awaits a rank's message."""
        self.changes += 1
        if self.file is not None:
            self.file.position(
                self.changes,
                self.iteration,
                time.time(),
                waits_for,
                self._text(self.phase),
                self._text(what),
            )

    def _text(self, what: object) -> bytes:
        known = self._texts.get(what)
        if known is None:
            known = self._texts[what] = str(what).encode()
        return known

    @property
    def works_alone(self) -> bool:
        """Whether minutes without a word are in order; the first iteration compiles."""
        return self.phase in ALONE or self.iteration == self.first_iteration

    @property
    def takes_its_time(self) -> bool:
        """Whether earlier steps don't tell how long this takes."""
        return self.works_alone or self.phase == "replay"

    def count(self, groups: Mapping[str, Counted]) -> None:
        """From now on tell how far this rank is in each of its groups (some of GROUPS)."""
        self._groups = dict(groups)
        if self.file is not None and self._facts is not None:
            firsts = {name: group.first for name, group in groups.items()}
            self._facts = replace(self._facts, groups=firsts)
            self.file.facts(self._facts)

    def collectives(self) -> list[int]:
        """Collectives begun in each of GROUPS; 0 where this rank is not in one."""
        known = self._groups
        return [known[name].begun() if name in known else 0 for name in GROUPS]
