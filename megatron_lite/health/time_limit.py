"""TimeLimit: the end of a batch job's time, of which the run keeps clear by itself.

The batch system's signal comes so long before it as was said at submission; a run whose steps and
saves turn out to take longer leaves before the signal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

SPARE = 5.0
"""Seconds for the ranks to agree and to end."""
VARIABLE = "SLURM_JOB_END_TIME"


@dataclass(frozen=True)
class TimeLimit:
    """`end` is in seconds since 1970; None: there is none, or nobody has told it. `started` is when
    the process began, by time.monotonic()."""

    end: float | None = None
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, env: Mapping[str, str]) -> TimeLimit:
        """What Slurm, or its batch script, tells the ranks; ValueError where that is no time."""
        told = env.get(VARIABLE, "")
        if told and not told.isdecimal():
            raise ValueError(f"{VARIABLE}={told}: must be seconds since 1970")
        return cls(float(told) if told else None)

    def minutes(self) -> float:
        """Since the start."""
        return (time.monotonic() - self.started) / 60

    def is_near(self, *, step: float, save: float) -> bool:
        """Whether one more step and a save, each up to twice as long as before (in seconds), may be
        too much."""
        return self.end is not None and time.time() + 2 * (step + save) + SPARE > self.end
