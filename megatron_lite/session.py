"""One process's life around training: process group, run folder, outcome, a clean end.

Called by train.py after the config was accepted; it knows nothing of models or data.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.build import Place, build_grid, build_trainer
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.deepspeed import deepspeed_config
from megatron_lite.config.load import LoadedConfig, resolved_dict
from megatron_lite.data.errors import DataError
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.trainer import TrainingStopped

REFUSALS = (DataError, CheckpointError)
"""Errors of the input, that all ranks meet alike: told in a line, without a traceback."""


def run(loaded: LoadedConfig, run_dir: Path, launched: Mapping[str, int]) -> int:
    """Train; returns the exit code of this rank."""
    rank, local_rank = launched.get("rank", 0), launched.get("local_rank", 0)
    device = open_distributed(loaded, rank=rank, local_rank=local_rank)
    outcome = Outcome(run_dir, rank=rank)
    try:
        if rank == 0:
            describe(loaded, run_dir)
        outcome.write("running")
        grid = build_grid(loaded.config, rank=rank, world_size=loaded.world_size)
        groups = ProcessGroups.create(grid)
        trainer = build_trainer(loaded.config, Place(groups, device, run_dir))
        state = trainer.fit()
        dist.barrier()
        outcome.write(state)
        trainer.report.close()
        trainer.engine.close()
        dist.destroy_process_group()
        return {"done": 0, "requeue": 3}[state]
    except REFUSALS as error:
        dist.barrier()
        outcome.write("refused", error=str(error))
        if rank == 0:
            print(error, file=sys.stderr)
        return 2
    except TrainingStopped as error:
        outcome.fail(str(error))
        if rank == 0:
            print(f"training stopped: {error}", file=sys.stderr)
        dist.barrier()
        return 1
    except BaseException as error:
        outcome.fail(f"{type(error).__name__}: {error}")
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Not by way of the interpreter's end: destructors of process groups can wait for ever for
        # peers, and loader workers would be joined.
        os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def open_distributed(loaded: LoadedConfig, *, rank: int, local_rank: int) -> torch.device:
    """Join the process group; returns this process's device."""
    # DeepSpeed calls collectives by names that torch 2.13 deprecates, at every use.
    warnings.filterwarnings("ignore", message=".torch.distributed", category=FutureWarning)
    torch.backends.cuda.matmul.allow_tf32 = loaded.config.precision.tf32
    torch.backends.cudnn.allow_tf32 = loaded.config.precision.tf32
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=loaded.config.parallel.distributed_timeout_minutes)
    arguments: dict[str, Any] = {"backend": "nccl" if cuda else "gloo", "timeout": timeout}
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(rank=rank, world_size=loaded.world_size, **arguments)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        dist.init_process_group(rank=0, world_size=1, store=store, **arguments)
    return device


def describe(loaded: LoadedConfig, run_dir: Path) -> None:
    """Leave in the run folder what would start the same run again."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = resolved_dict(loaded.config)
    derived = deepspeed_config(loaded.config, loaded.data_parallel_size)
    for name, value in (("config.json", config), ("ds_config.json", derived)):
        (run_dir / name).write_text(json.dumps(value, indent=2) + "\n")
    for line in loaded.warnings:
        print(f"warning: {line}", file=sys.stderr)


class Outcome:
    """RUN_DIR/status.json: launchers lose exit codes, a file does not."""

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank

    def write(self, state: str, **facts: Any) -> None:
        """Replace the status; rank 0 speaks for all."""
        if self._rank == 0:
            self._replace({"state": state, **facts})

    def fail(self, error: str) -> None:
        """Tell of a failure; of several ranks, the first one's stays."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        if self._first():
            self._replace({"state": "failed", "rank": self._rank, "error": error})

    def _first(self) -> bool:
        try:
            status = json.loads((self._run_dir / "status.json").read_text())
        except (OSError, ValueError):
            return True
        return status.get("state") != "failed"

    def _replace(self, status: Mapping[str, Any]) -> None:
        new = self._run_dir / f".status-{self._rank}.json"
        new.write_text(json.dumps(status, indent=2) + "\n")
        new.replace(self._run_dir / "status.json")
