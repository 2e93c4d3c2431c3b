"""One run at a time in a run folder: a lock that rank 0 holds there for as long as it lives.

Two runs would mix their curves and remove each other's checkpoints. Called by train.py; jobs of
several machines are kept apart by submissions.py. No torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

FILE = ".lock"
PATIENCE = 30.0
"""Seconds in which nothing of an earlier run is left."""
_LOOK = 0.5


class Occupied(Exception):
    """Another run goes on in the folder."""


def occupy(run_dir: Path, *, patience: float = PATIENCE) -> TextIO | None:
    """Take the folder; it is held until what is returned is closed, or this process ends.

    Occupied where a process of this machine still holds it after `patience` seconds. None where the
    folder can't be locked, and for a holder on another machine, of whose death a network file
    system may not know: that is told as a warning.
    """
    try:
        lock = (run_dir / FILE).open("a+")
    except OSError:  # the preflight tells
        return None
    end, told = time.monotonic() + patience, False
    while not _locked(lock):
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        if not holder.endswith(_here()):
            print(f"warning: {run_dir}: {holder} may train in this folder, too", file=sys.stderr)
            return None
        if time.monotonic() > end:
            lock.close()
            raise Occupied(
                f"{run_dir}: {holder} trains in this folder; wait for it, end it, or choose "
                "another --run-dir"
            )
        if not told:
            print(f"waiting for {holder}, which is still in {run_dir}", file=sys.stderr, flush=True)
        told = True
        time.sleep(_LOOK)
    with suppress(OSError):  # a full disk
        lock.truncate(0)
        lock.write(f"process {os.getpid()}{_here()}\n")
        lock.flush()
    return lock


def is_occupied(run_dir: Path) -> bool:
    """Whether a run goes on in the folder."""
    try:
        with (run_dir / FILE).open("r+") as lock:
            return not _locked(lock)
    except OSError:  # no run has been there
        return False


def _here() -> str:
    return f" on {socket.gethostname()}"


def _locked(lock: TextIO) -> bool:
    """False where another process holds it."""
    try:
        # Of this process alone: loader workers that outlive it for a moment don't hold it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        pass
    return True
