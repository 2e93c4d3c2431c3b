"""TimeLimit: the end of a batch job's time, of which the run keeps clear by itself.

The batch system's signal comes so long before it as was said at submission; a run whose steps and
saves turn out to take longer leaves before the signal. Asked by the trainer, on rank 0.
"""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Thread

SPARE = 5.0
"""Seconds for the ranks to agree and to end."""
PATIENCE = 3.0
"""Seconds in which Slurm has to answer, or the end stays the one that is known."""
VARIABLE = "SLURM_JOB_END_TIME"
_TIMES = re.compile(r"^\s*StartTime=\S+ EndTime=(\S+)", re.MULTILINE)
_NO_LIMIT = re.compile(r"^\s*RunTime=\S+ TimeLimit=UNLIMITED\b", re.MULTILINE)
Ask = Callable[[], float | None]
"""Tells the end as it is by now, infinity where there is none any more; None: no answer."""


@dataclass
class TimeLimit:
    """`end` is in seconds since 1970; None: there is none, or nobody has told it. `started` is when
    the process began, by time.monotonic()."""

    end: float | None = None
    started: float = field(default_factory=time.monotonic)
    ask: Ask | None = None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> TimeLimit:
        """What Slurm, or its batch script, tells the ranks; ValueError where that is no time."""
        told = env.get(VARIABLE, "")
        if told and not told.isdecimal():
            raise ValueError(f"{VARIABLE}={told}: must be seconds since 1970")
        job = env.get("SLURM_JOB_ID")
        if array := env.get("SLURM_ARRAY_JOB_ID"):  # whose last task has the array's number
            job = f"{array}_{env.get('SLURM_ARRAY_TASK_ID')}"
        ask = None if job is None else partial(_ask_slurm, job, dict(env))
        return cls(float(told) if told else None, ask=ask)

    def minutes(self) -> float:
        """Since the start."""
        return (time.monotonic() - self.started) / 60

    def is_near(self, *, step: float, save: float) -> bool:
        """Whether one more step and a save, each up to twice as long as before (in seconds), may be
        too much. Before it says so, it asks whether the end has been moved: seconds, once."""
        needed = 2 * (step + save) + SPARE + (0 if self.ask is None else PATIENCE)
        if self.ask is not None and self._ends_within(needed):
            self.end = _in_time(self.ask) or self.end
        return self._ends_within(needed)

    def _ends_within(self, seconds: float) -> bool:
        return self.end is not None and time.time() + seconds > self.end


def _in_time(ask: Ask) -> float | None:
    """The answer; None where it does not come in time, whatever hangs."""
    answers: list[float | None] = []
    asking = Thread(target=lambda: answers.append(ask()), name="time-limit", daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answers[0] if answers else None


def _ask_slurm(job: str, env: Mapping[str, str]) -> float | None:
    """The present end of a job; None where Slurm can't tell, as in a container without its
    commands."""
    try:
        told = subprocess.run(
            ["scontrol", "show", "job", job],
            env={**env, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            errors="replace",  # a job may have any name
            timeout=PATIENCE,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = _TIMES.search(told)
    if found is not None and found[1].isdecimal():
        return float(found[1])
    return math.inf if _NO_LIMIT.search(told) else None
