"""Measures the time of training steps, with saving, loading and evaluating kept apart.

Wall-clock time of this process only; it does not wait for the GPU. The trainer reads the loss, and
so waits, before it asks. The clock is a parameter, so tests need not sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_lite.monitoring.stragglers import WorkClock, Worked

Apart = Literal["save", "load", "evaluation", "trace"]


@dataclass(frozen=True, slots=True)
class Lap:
    """Training time since the previous lap, in seconds, and the iterations it went into."""

    seconds: float
    iterations: int
    waited: float = 0.0
    """Those of the seconds in which this process waited for data."""
    worked: Worked = field(default_factory=Worked)
    """What went into its own forward and backward actions, see stragglers.py."""

    @property
    def seconds_per_iteration(self) -> float:
        """The mean time of one iteration."""
        return self.seconds / self.iterations


@dataclass(slots=True)
class StepTimer:
    """Counts all time since its creation as training, except what runs within `apart`.

    So data loading and logging count, as they should: they lengthen the run. `totals` are the
    seconds of the whole run by use, complete up to the latest lap.
    """

    clock: Callable[[], float] = time.perf_counter
    work: WorkClock = field(default_factory=WorkClock)
    totals: dict[str, float] = field(init=False)
    _lap_start: float = field(init=False)
    _apart_in_lap: float = field(init=False, default=0.0)
    _waited_in_lap: float = field(init=False, default=0.0)
    _iterations: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.totals = dict.fromkeys(("train", *get_args(Apart)), 0.0)
        self._lap_start = self.clock()

    def step_done(self) -> None:
        """Counts one iteration, skipped or not."""
        self._iterations += 1

    @contextmanager
    def apart(self, use: Apart) -> Iterator[None]:
        """Books the time of the with-block under `use` instead of training; does not nest."""
        start = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - start
            self.totals[use] += seconds
            self._apart_in_lap += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the with-block, which remains training time, as waiting for data."""
        start = self.clock()
        yield
        self._waited_in_lap += self.clock() - start

    def lap(self) -> Lap:
        """Ends the current lap and starts the next; raises ValueError if it held no iteration."""
        if self._iterations == 0:
            raise ValueError("no iteration has ended since the previous lap")
        return self._end_lap()

    def drop_lap(self) -> None:
        """Starts the next lap without the iterations since the last one, which were undone; the
        time that they took remains training time."""
        self._end_lap()

    def _end_lap(self) -> Lap:
        now = self.clock()
        seconds = now - self._lap_start - self._apart_in_lap
        lap = Lap(seconds, self._iterations, self._waited_in_lap, self.work.lap())
        self.totals["train"] += lap.seconds
        self._lap_start, self._apart_in_lap, self._iterations = now, 0.0, 0
        self._waited_in_lap = 0.0
        return lap
