"""Peers: the processes of one job, and what they say before they leave.

It goes through the job's key-value store, not through collectives: it has to work when some ranks
hang in one and others are gone. Called by session.py.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any

from megatron_lite.health.processes import has_ended, state

POLL_SECONDS = 0.1


class Peers:
    """The ranks of a job, seen from one of them. `store` is a torch.distributed store.

    All ranks make theirs together: it waits for the process ids of the others.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        host = socket.gethostname() + _pid_namespace()
        store.set(f"process/{rank}", f"{os.getpid()} {host}")
        known = store.multi_get([f"process/{r}" for r in range(world_size)])
        places = [place.decode().split(" ", 1) for place in known]
        self._here = {r: int(pid) for r, (pid, at) in enumerate(places) if at == host}

    def leave(self, *, patience: float, for_rank_0: float = 0.0) -> list[int]:
        """Say that this rank leaves and wait for the others; returns the ranks that said so too.

        After `patience` seconds it does not wait any longer: the others may know of no reason. For
        rank 0, which speaks for all, it waits `for_rank_0` seconds if that is longer.
        """
        began = time.monotonic()
        try:
            self._store.set(f"leaving/{self._rank}", "")
            while len(leaving := self._leaving()) < self._world_size:
                limit = patience if 0 in leaving else max(patience, for_rank_0)
                if time.monotonic() - began > limit:
                    break
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store has gone, with rank 0 that held it
            return [0]
        return leaving

    def gone(self) -> list[int]:
        """The other ranks on this machine whose process has ended."""
        others = {rank: pid for rank, pid in self._here.items() if rank != self._rank}
        return [rank for rank, pid in others.items() if has_ended(pid)]

    def end_stopped(self) -> None:
        """End the ranks on this machine that SIGSTOP holds: they heed no other signal."""
        for rank, pid in self._here.items():
            if rank != self._rank and state(pid) == "T":
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _leaving(self) -> list[int]:
        return [r for r in range(self._world_size) if self._store.check([f"leaving/{r}"])]


def _pid_namespace() -> str:
    """Containers on one machine may each count their processes anew; "" where nobody can tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
