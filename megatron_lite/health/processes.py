"""What the kernel of this machine knows of a process. No /proc, no answer."""

from __future__ import annotations

import os
from pathlib import Path

STOPPED = ("T", "t")
"""States of a process that SIGSTOP or a debugger holds."""


def state(pid: int) -> str | None:
    """The letter that ps shows; "" for a process that is no more, None where nobody can tell."""
    found = _stat(pid)
    if found is None:
        return None
    return found[0] if found else ""


def birth(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 where nobody can tell."""
    found = _stat(pid)
    return int(found[19]) if found else 0


def has_ended(pid: int) -> bool:
    """True for a process that is no more, and for one that only waits to be reaped."""
    return state(pid) in ("", "Z")


def own_work() -> tuple[float, int]:
    """Seconds of processors that this process has used, and bytes that it has read and written."""
    times = os.times()
    try:
        counts = Path("/proc/self/io").read_text().split()
    except OSError:
        return times.user + times.system, 0
    return times.user + times.system, int(counts[1]) + int(counts[3])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; [] for a process that is no more."""
    try:
        # The name in brackets may hold anything; the state follows it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        pass  # no such process, no /proc, or one that hides the processes of others
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return []
    except OSError:
        return None
    return None
