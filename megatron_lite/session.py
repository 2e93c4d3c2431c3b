"""One process's life around training: process group, run folder, outcome, a clean end.

Called by train.py after the config was accepted; it knows nothing of models or data.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_lite.build import Place, build_grid, build_trainer
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.deepspeed import deepspeed_config
from megatron_lite.config.load import LoadedConfig, resolved_dict
from megatron_lite.data.errors import DataError
from megatron_lite.health.peers import Peers, when_orphaned
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.outcome import Outcome
from megatron_lite.trainer import Trainer, TrainingStopped

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
PATIENCE = 5.0
"""Seconds in which all ranks have met an error of the input, if they meet it at all."""


class Refused(Exception):
    """The input is at fault: told in a line, without a traceback."""


def run(
    loaded: LoadedConfig, run_dir: Path, launched: Mapping[str, int], *, launcher: int | None = None
) -> int:
    """Train; returns the exit code of this rank.

    `launcher` is the process id of a parent without which this process must not go on.
    """
    rank, local_rank = launched.get("rank", 0), launched.get("local_rank", 0)
    outcome = Outcome(run_dir, rank=rank)
    if launcher is not None:
        when_orphaned(launcher, lambda: _abandon(outcome))
    peers: Peers | None = None
    try:
        device, store = open_distributed(loaded, rank=rank, local_rank=local_rank)
        peers = Peers(store, rank=rank, world_size=loaded.world_size)
        return _train(loaded, run_dir, outcome, rank=rank, device=device)
    except Refused as error:
        _tell_refusal(error, outcome, peers, rank=rank)
        _leave(REFUSED)
    except (TrainingStopped, CheckpointError) as error:
        # Both are agreed among the ranks before they are raised.
        if rank == 0:
            outcome.end("failed", str(error))
            print(f"training stopped: {error}", file=sys.stderr, flush=True)
        if peers is not None:
            peers.leave(patience=PATIENCE)
        _leave(FAILED)
    except BaseException as error:
        _tell_failure(error, outcome, peers, rank=rank)
        _leave(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED)


def _train(
    loaded: LoadedConfig, run_dir: Path, outcome: Outcome, *, rank: int, device: torch.device
) -> int:
    if rank == 0:
        describe(loaded, run_dir)
    outcome.write("running")
    grid = build_grid(loaded.config, rank=rank, world_size=loaded.world_size)
    groups = ProcessGroups.create(grid)
    try:
        trainer = build_trainer(loaded.config, Place(groups, device, run_dir))
    except (DataError, CheckpointError) as error:
        raise Refused(str(error)) from error
    state = _fit(trainer)
    dist.barrier()
    outcome.write(state)
    trainer.report.close()
    trainer.engine.close()
    dist.destroy_process_group()
    return {"done": 0, "requeue": 3}[state]


def _fit(trainer: Trainer) -> str:
    try:
        return trainer.fit()
    except DataError as error:  # a token id that the vocabulary lacks shows only when it is read
        raise Refused(str(error)) from error


def _tell_refusal(error: Refused, outcome: Outcome, peers: Peers | None, *, rank: int) -> None:
    """Once for all ranks that met it: rank 0 tells, or the first of the others if it met none."""
    teller = 0
    if rank > 0 and peers is not None:
        teller = min(peers.leave(patience=PATIENCE))
    if rank == teller:
        outcome.end("refused", str(error))
        print(error, file=sys.stderr, flush=True)
    if rank == 0 and peers is not None:
        peers.leave(patience=PATIENCE)


def _tell_failure(
    error: BaseException, outcome: Outcome, peers: Peers | None, *, rank: int
) -> None:
    """Leave word of the rank that failed first: this one, or one that died without a word."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        said = f"the process ended by itself, with exit code {error.code}, before training did"
    lost: list[int] = []
    if peers is not None and isinstance(error, RuntimeError):
        time.sleep(0.5)  # a dying process's sockets close a moment before it ends
        lost = [r for r in peers.gone() if r != rank]
    if lost:
        said = f"ended without a word: killed, or left early; rank {rank} noticed ({said})"
        first = outcome.end("failed", said, rank=lost[0])
    else:
        first = outcome.end("failed", said)
    if first and not lost:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return
    status = outcome.read()
    cause = f"rank {status.get('rank')}: {status.get('error')}"
    print(f"rank {rank} stops because of {cause}", file=sys.stderr, flush=True)


def _abandon(outcome: Outcome) -> NoReturn:
    outcome.end("failed", "the launcher is gone")
    _leave(FAILED)


def _leave(code: int) -> NoReturn:
    """End this process at once.

    Not by way of the interpreter's end: destructors of process groups can wait for ever for peers,
    and loader workers would be joined (left alone they end by themselves).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def open_distributed(
    loaded: LoadedConfig, *, rank: int, local_rank: int
) -> tuple[torch.device, Any]:
    """Join the process group; returns this process's device and the job's key-value store."""
    # DeepSpeed calls collectives by names that torch 2.13 deprecates, at every use.
    warnings.filterwarnings("ignore", message=".torch.distributed", category=FutureWarning)
    torch.backends.cuda.matmul.allow_tf32 = loaded.config.precision.tf32
    torch.backends.cudnn.allow_tf32 = loaded.config.precision.tf32
    os.environ.setdefault("LOCAL_RANK", str(local_rank))  # DeepSpeed insists on it
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=loaded.config.parallel.distributed_timeout_minutes)
    if loaded.world_size == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    elif "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        store, *_ = next(dist.rendezvous("env://", rank, loaded.world_size, timeout=timeout))
    else:
        raise Refused(
            f"{loaded.world_size} ranks, but MASTER_ADDR and MASTER_PORT, where they would meet, "
            "are not both set: start with torchrun, or set them (the same for all ranks)"
        )
    dist.init_process_group(
        backend="nccl" if cuda else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=loaded.world_size,
        timeout=timeout,
    )
    return device, dist.PrefixStore("peers", store)


def describe(loaded: LoadedConfig, run_dir: Path) -> None:
    """Leave in the run folder what would start the same run again."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = resolved_dict(loaded.config)
    derived = deepspeed_config(loaded.config, loaded.data_parallel_size)
    for name, value in (("config.json", config), ("ds_config.json", derived)):
        (run_dir / name).write_text(json.dumps(value, indent=2) + "\n")
    for line in loaded.warnings:
        print(f"warning: {line}", file=sys.stderr)
