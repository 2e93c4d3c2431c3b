"""Peers: the processes of one job, and what they say before they leave.

It goes through the job's key-value store, not through collectives: it has to work when some ranks
hang in one and others are gone. Called by session.py.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.1


class Peers:
    """The ranks of a job, seen from one of them. `store` is a torch.distributed store."""

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        store.set(f"process/{rank}", f"{os.getpid()} {socket.gethostname()}")

    def leave(self, *, patience: float) -> list[int]:
        """Say that this rank leaves and wait for the others; returns the ranks that said so too.

        After `patience` seconds it does not wait any longer: the others may know of no reason.
        """
        deadline = time.monotonic() + patience
        try:
            self._store.set(f"leaving/{self._rank}", "")
            while len(leaving := self._with("leaving")) < self._world_size:
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store has gone, with rank 0 that held it
            return [0]
        return leaving

    def gone(self) -> list[int]:
        """Ranks on this machine whose process has ended; [] where the store is gone."""
        host = socket.gethostname()
        try:
            known = {rank: self._store.get(f"process/{rank}") for rank in self._with("process")}
        except RuntimeError:
            return []
        places = {rank: place.decode().split(" ", 1) for rank, place in known.items()}
        return [rank for rank, (pid, at) in places.items() if at == host and has_ended(int(pid))]

    def _with(self, topic: str) -> list[int]:
        return [r for r in range(self._world_size) if self._store.check([f"{topic}/{r}"])]


def has_ended(pid: int) -> bool:
    """True for a process that is no more, and for one that only waits to be reaped."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return True
    except OSError:  # no /proc, or a process of somebody else
        return False
    # The name in brackets may hold anything; the state follows it.
    return status.rpartition(")")[2].split()[0] == "Z"


def when_orphaned(parent: int, act: Callable[[], None]) -> None:
    """Call `act` from a thread of its own once `parent` is no longer this process's parent.

    A launcher that is killed can't take its ranks with it, and they would go on without it.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        act()

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
