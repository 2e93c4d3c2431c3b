"""One process's life around training: process group, run folder, outcome, a clean end.

Called by train.py after the config was accepted; it knows nothing of models or data.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.build import build_trainer
from megatron_lite.build_model import Place, build_grid
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.deepspeed import deepspeed_config
from megatron_lite.config.load import LoadedConfig, resolved_dict
from megatron_lite.data.errors import DataError
from megatron_lite.ending import Ending
from megatron_lite.guard import TrainingStopped
from megatron_lite.health.peers import Peers
from megatron_lite.health.preflight.checks import Preflight
from megatron_lite.health.preflight.verdict import PreflightFailed
from megatron_lite.health.stopping import StopRequest
from megatron_lite.health.time_limit import TimeLimit
from megatron_lite.health.watch import when_orphaned, when_signalled
from megatron_lite.health.watchdog import GRACE
from megatron_lite.life import Life, counted_groups, turn, who_hangs
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.host_memory import keep_freed_memory
from megatron_lite.outcome import Outcome
from megatron_lite.pipeline.actions import ScheduleError
from megatron_lite.rendezvous import meeting_point, node_name
from megatron_lite.run_texts import run_texts
from megatron_lite.trainer import Trainer


class Refused(Exception):
    """The input is at fault: told in a line, without a traceback."""


class Unmet(Refused):
    """The ranks did not come together. Perhaps the input is at fault, perhaps a node."""


def run(
    loaded: LoadedConfig,
    run_dir: Path,
    launched: Mapping[str, int],
    *,
    stop: StopRequest,
    time_limit: TimeLimit,
    lineage: Sequence[int] = (),
) -> int:
    """Train; returns the exit code of this rank.

    `stop` may have been asked for already. `lineage` has the process ids of this process and of
    the launchers above it, one above the other, without which it must not go on.
    """
    rank, local_rank = launched.get("rank", 0), launched.get("local_rank", 0)
    outcome = Outcome(run_dir, rank=rank)
    ending = Ending(outcome, stop, rank=rank, world_size=loaded.world_size)
    when_signalled(ending.signalled)
    for child, parent in pairwise(lineage):
        own = child == os.getpid()
        when_orphaned(child, parent, ending.orphaned if own else ending.launcher_gone)
    try:
        place, life = _prepare(loaded, run_dir, ending, rank=rank, local_rank=local_rank)
        return _train(loaded, replace(place, time_limit=time_limit), ending, life)
    except Refused as error:
        ending.refused(error, unmet=isinstance(error, Unmet))
    except (TrainingStopped, CheckpointError) as error:
        # All are agreed among the ranks before they are raised.
        ending.stopped(error)
    except PreflightFailed as error:
        ending.stopped(error, hung=error.silence)
    except BaseException as error:
        ending.failed(error)


def plan_grid(loaded: LoadedConfig, *, rank: int) -> Grid:
    """The grid of the run, seen from this rank."""
    try:
        return build_grid(loaded.config, rank=rank, world_size=loaded.world_size)
    except ScheduleError as error:
        raise Refused(f"parallel.pipeline_schedule: {error}") from error


def _prepare(
    loaded: LoadedConfig,
    run_dir: Path,
    ending: Ending,
    *,
    rank: int,
    local_rank: int,
) -> tuple[Place, Life]:
    """Meet the other ranks, check what all of them run on, and make the groups."""
    grid = plan_grid(loaded, rank=rank)
    life = begin_life(loaded, run_dir, grid)
    ending.heartbeat = None if life is None else life.heartbeat
    with ending.meeting():
        device, store = meet(loaded, rank=rank, local_rank=local_rank)
    # A connection of its own: one that waits in a collective can't be asked anything else.
    peers = dist.PrefixStore("peers", store.clone())
    ending.peers = Peers(peers, rank=rank, world_size=loaded.world_size)
    limit, after = _timeout(loaded).total_seconds(), turn(rank, loaded.world_size)
    if life is not None:
        life.watchdog.arm(
            limit, lambda: ending.hung(lambda: who_hangs(run_dir, limit), after=after)
        )
    with suppress(OSError):  # where nothing can be written, the preflight tells
        ending.outcome.write("running")
    preflight = Preflight(
        loaded.config,
        run_dir,
        store=dist.PrefixStore("preflight", store.clone()),
        rank=rank,
        world_size=loaded.world_size,
        device=device,
    )
    preflight.nodes(local_rank=local_rank, env=os.environ)
    assert life is not None, "the preflight found a folder in which no heartbeat could be written"
    if rank == 0:
        describe(loaded, run_dir, holders=len(grid.gradient_groups()[0]))
    groups = join(loaded, grid, store, device)
    life.heartbeat.count(counted_groups(groups))
    preflight.groups(groups.communicators, give_up=lambda e: ending.stopped(e, hung=e.silence))
    named = node_name(os.environ)
    return Place(groups, device, run_dir, ending.stop, heartbeat=life.heartbeat, node=named), life


def _train(loaded: LoadedConfig, place: Place, ending: Ending, life: Life) -> int:
    try:
        trainer = build_trainer(loaded.config, place, origins=loaded.origins)
    except (DataError, CheckpointError) as error:
        raise Refused(str(error)) from error
    trainer.report.texts(run_texts(trainer, os.environ))
    state = _fit(trainer)
    dist.barrier()
    ending.settle()
    reason = {} if trainer.left_because is None else {"reason": trainer.left_because}
    ending.outcome.write(state, iteration=trainer.progress.iteration, **reason)
    life.end(state)
    trainer.report.close()
    dist.barrier()  # a launcher ends the others, rank 0 too, when one leaves with 3
    trainer.engine.close()
    dist.destroy_process_group()
    return {"done": 0, "requeue": 3}[state]


def begin_life(loaded: LoadedConfig, run_dir: Path, grid: Grid) -> Life | None:
    """This rank's heartbeat and watchdog.

    None where the run's folder can't be written: the preflight tells on which nodes. Refused if
    there is none.
    """
    try:
        return Life.begin(run_dir, grid, os.environ)
    except OSError as error:
        if loaded.config.launch.preflight != "off":
            return None
        raise Refused(f"{run_dir}: heartbeats can't be written there: {error}") from error


def _fit(trainer: Trainer) -> str:
    try:
        return trainer.fit()
    except DataError as error:  # a token id that the vocabulary lacks shows only when it is read
        raise Refused(str(error)) from error


def meet(loaded: LoadedConfig, *, rank: int, local_rank: int) -> tuple[torch.device, Any]:
    """This process's device, and the job's key-value store; no process group yet."""
    # DeepSpeed calls collectives by names that torch 2.13 deprecates, at every use.
    warnings.filterwarnings("ignore", message=".torch.distributed", category=FutureWarning)
    torch.backends.cuda.matmul.allow_tf32 = loaded.config.precision.tf32
    torch.backends.cudnn.allow_tf32 = loaded.config.precision.tf32
    os.environ.setdefault("LOCAL_RANK", str(local_rank))  # DeepSpeed insists on it
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", gpu_of(local_rank)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # deepspeed's launcher sets it. DeepSpeed then keeps 66 MiB a rank in /dev/shm, even after
        # the end, for a collective that training does not use.
        os.environ.pop("LOCAL_SIZE", None)
    if loaded.world_size == 1:
        return device, dist.TCPStore("127.0.0.1", 0, is_master=True)
    return device, _meet(rank, loaded.world_size, _timeout(loaded))


def gpu_of(local_rank: int) -> int:
    """Which of the GPUs that this process sees is its own."""
    count = torch.cuda.device_count()
    if count == 1:  # Slurm may show each task its own alone; the preflight finds one that is shared
        return 0
    if local_rank >= count:
        raise Refused(
            f"the rank number {local_rank} of its node sees {count} GPUs: start as many ranks a "
            "node as it has GPUs, with all of them (or exactly one) visible to each"
        )
    return local_rank


def join(loaded: LoadedConfig, grid: Grid, store: Any, device: torch.device) -> ProcessGroups:
    """Make the process group of all ranks, and those of the grid."""
    timeout = _timeout(loaded) + timedelta(seconds=GRACE)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=grid.rank,
        world_size=grid.world_size,
        timeout=timeout,
    )
    return ProcessGroups.create(grid, timeout=timeout)


def _meet(rank: int, world_size: int, timeout: timedelta) -> Any:
    """The store of a job of several ranks, held by rank 0."""
    try:
        place = meeting_point(os.environ, launcher=os.getppid())
    except ValueError as error:
        raise Refused(f"where the ranks meet can't be told: {error}") from error
    if place is None:
        raise Refused(
            f"{world_size} ranks, but MASTER_ADDR and MASTER_PORT, where they would meet, are not "
            "both set: start with torchrun or srun, or set them (the same for all ranks)"
        )
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place[0], str(place[1])
    try:
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    except dist.DistError as error:
        raise Unmet(
            f"rank {rank} of {world_size} can't meet the others at {place[0]}:{place[1]}: {error}"
        ) from error
    return store


def _timeout(loaded: LoadedConfig) -> timedelta:
    return timedelta(minutes=loaded.config.parallel.distributed_timeout_minutes)


def describe(loaded: LoadedConfig, run_dir: Path, *, holders: int) -> None:
    """Leave in the run folder what would start the same run again; `holders` ranks hold the same
    parameters."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = resolved_dict(loaded.config)
    derived = deepspeed_config(loaded.config, holders)
    for name, value in (("config.json", config), ("ds_config.json", derived)):
        (run_dir / name).write_text(json.dumps(value, indent=2) + "\n")
    for line in loaded.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for line in loaded.notes:
        print(f" {line} |", flush=True)
