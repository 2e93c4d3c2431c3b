"""How long a rank works itself, so that the slowest of all ranks can be named.

Counted are forward and backward actions, from the moment at which what they need is there: waiting
for messages of other stages is left out. Collectives within an action are not, so that the ranks of
one tensor-parallel group (and with ZeRO-3 all ranks) show what the slowest of them took. The
optimizer step, where ranks wait for each other all the time, is no part of it. On GPUs the time is
the device's. Fed by the executor by way of build.py; the reporter compares the ranks.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

CLEARLY = 1.25
"""Times the median of the others from which on a rank is told on the console, if it also takes a
twentieth of an iteration more."""
_WORTH_TELLING = 0.05


class Stopwatch(Protocol):
    """Marks moments, and measures between two of them."""

    def mark(self) -> Any:
        """This moment."""

    def passed(self, mark: Any) -> bool:
        """Whether a moment that was marked has come."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments that have come."""


class HostStopwatch:
    """Time of this process."""

    def mark(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        """A moment that was marked on the host is over."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin


class DeviceStopwatch:
    """Time of the current CUDA stream, which lags behind the host; nothing waits for it."""

    def mark(self) -> Any:
        """An event behind all that was launched."""
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        """Whether the device has come to it."""
        return bool(mark.query())

    def seconds(self, begin: Any, end: Any) -> float:
        """The device's own count."""
        return float(begin.elapsed_time(end)) / 1000


Part = tuple[str, int]
"""Kind of an action and its stage."""


@dataclass(frozen=True)
class Worked:
    """Seconds of a lap of one rank."""

    parts: dict[Part, float] = field(default_factory=dict)
    """Its own work."""
    waited: float = 0.0
    """Waiting for messages between its actions, and before the first one."""

    @property
    def seconds(self) -> float:
        """All of its own work."""
        return sum(self.parts.values())


@dataclass
class WorkClock:
    """What one rank did since the previous lap."""

    stopwatch: Stopwatch = field(default_factory=HostStopwatch)
    _doing: Part | None = None
    _begun: Any = None
    _spans: deque[tuple[Part | None, Any, Any]] = field(default_factory=deque)
    _seconds: dict[Part | None, float] = field(default_factory=dict)

    def begin(self, part: Part) -> None:
        """An action begins; what was before it ends."""
        self._next(part)

    def wait(self) -> None:
        """The rank waits for a message."""
        self._next(None)

    def pause(self) -> None:
        """The rank's actions are done."""
        if self._begun is not None:
            self._spans.append((self._doing, self._begun, self.stopwatch.mark()))
            self._begun = None
        self._count()

    def lap(self) -> Worked:
        """Ends the lap; what a device has not done yet belongs to the next one."""
        self._count()
        seconds, self._seconds = self._seconds, {}
        waited = seconds.pop(None, 0.0)
        return Worked({part: each for part, each in seconds.items() if part is not None}, waited)

    def _next(self, part: Part | None) -> None:
        self.pause()
        self._doing, self._begun = part, self.stopwatch.mark()

    def _count(self) -> None:
        while self._spans and self.stopwatch.passed(self._spans[0][2]):
            part, begin, end = self._spans.popleft()
            seconds = self.stopwatch.seconds(begin, end)
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds


@dataclass(frozen=True)
class Slowest:
    """The rank with most work of its own."""

    rank: int
    share: float
    """What this work took of the time of training, up to 1: then all others wait for it."""
    ratio: float
    """Times the median of the other ranks; 1 where there are none, or they did nothing."""
    worth_telling: bool


def slowest(worked: Sequence[float], seconds: float) -> Slowest:
    """Compare the seconds of work of all ranks, by rank, in a lap of `seconds`."""
    most = max(worked)
    rank = list(worked).index(most)
    others = [*worked[:rank], *worked[rank + 1 :]]
    usual = statistics.median(others) if others else most
    ratio = most / usual if usual > 0 else 1.0
    worth_telling = ratio >= CLEARLY and most - usual >= _WORTH_TELLING * seconds
    return Slowest(rank, most / seconds if seconds > 0 else 0.0, ratio, worth_telling)
