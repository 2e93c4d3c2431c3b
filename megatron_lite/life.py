"""Life: what tells others, and this process itself, whether it goes on; put together for one rank.

The parts are health/'s, which knows no groups. Called by session.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_lite.health import stacks
from megatron_lite.health.diagnosis import describe, diagnose
from megatron_lite.health.heartbeat import Counted, Heartbeat
from megatron_lite.health.observation import observe
from megatron_lite.health.processes import birth
from megatron_lite.health.record import GROUPS, Facts, RecordFile
from megatron_lite.health.watchdog import Watchdog
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import Group, ProcessGroups
from megatron_lite.rendezvous import node_name, which_start

RANKS_A_SECOND = 512
"""Heartbeats that a shared file system is asked to take; more ranks beat less often."""
EXAMINERS = 16
"""Ranks that look for the one that hangs, each at all heartbeats; the others let them, and do it
themselves only if no word was left after LATE seconds."""
LATE = 25.0


@dataclass(frozen=True)
class Life:
    """The heartbeat of a rank and its watchdog."""

    heartbeat: Heartbeat
    watchdog: Watchdog

    @classmethod
    def begin(cls, run_dir: Path, grid: Grid, env: Mapping[str, str]) -> Life:
        """Beat from now on; OSError where the run's folder can't be written."""
        launch, restart = which_start(env)
        facts = Facts(
            rank=grid.rank,
            world_size=grid.world_size,
            host=socket.gethostname(),
            node=node_name(env),
            pid=os.getpid(),
            born=birth(os.getpid()),
            started=time.time(),
            launch=launch,
            restart=restart,
            pulse_seconds=max(1.0, grid.world_size / RANKS_A_SECOND),
            place=grid.coordinates,
        )
        file = stacks.create(run_dir, grid.rank)
        stacks.answer(file)  # before the heartbeat tells anybody whom to ask
        heartbeat = Heartbeat(RecordFile(run_dir, facts), facts)
        watchdog = Watchdog(heartbeat, file, pulse_seconds=facts.pulse_seconds)
        watchdog.start()
        return cls(heartbeat, watchdog)

    def end(self, state: str) -> None:
        """The run came to its end in order; its process groups may go then."""
        self.heartbeat.at("ended", state)
        self.watchdog.stop()


def turn(rank: int, world_size: int) -> float:
    """Seconds after which a rank looks for the one that hangs."""
    examines = rank % max(1, world_size // EXAMINERS) == 0
    return min(0.02 * rank, 5.0) if examines else LATE


def counted_groups(groups: ProcessGroups) -> dict[str, Counted]:
    """The groups whose collectives a heartbeat counts. torch counts them; its name for that is
    private, which the pinned version makes up for."""
    handles = {"world": (0, dist.group.WORLD)}
    for name in GROUPS[1:]:
        group: Group = getattr(groups, name)
        if group.handle is not None:
            handles[name] = (min(group.ranks), group.handle)
    return {
        name: Counted(first, handle._get_sequence_number_for_group)  # type: ignore[attr-defined]
        for name, (first, handle) in handles.items()
        if handle is not None
    }


def who_hangs(run_dir: Path, limit: float) -> tuple[int | None, str] | None:
    """The rank that holds up the others, if one does, and a sentence on the hang; None where some
    rank has moved within the last `limit` seconds."""
    seen = observe(run_dir)
    found = diagnose(seen, moves_within=limit)
    if not found.hangs:
        return None
    told = "; ".join(describe(found, seen))
    return (
        found.lagging[0].rank if found.lagging else None,
        f"nothing has moved for {limit / 60:g} minutes (parallel.distributed_timeout_minutes): "
        f"{told}. The Python stacks are in {run_dir / stacks.STACKS}",
    )
