"""What is asked of DeepSpeed: initialisation, the Adam that fits, the loss scaler, CSV files.

The one file that imports deepspeed.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.config import CSVConfig
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn
from torch.utils.cpp_extension import _get_build_directory

from megatron_lite.engine.interface import SCALER_STATE
from megatron_lite.mpu.groups import DeepSpeedMpu


def initialize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    mpu: DeepSpeedMpu,
) -> Any:
    """A DeepSpeed engine around `module`; its chatter stays below the config's `log_level`."""
    level = getattr(logging, config["log_level"].upper())
    logging.getLogger("DeepSpeed").setLevel(level)
    with nullcontext() if level <= logging.INFO else redirect_stdout(StringIO()):
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config={k: v for k, v in config.items() if k != "log_level"},
            mpu=mpu,
            dist_init_required=False,
        )
    scaler = engine.optimizer.loss_scaler
    if hasattr(scaler, "raise_error_at_min_scale"):
        # At the floor DeepSpeed would end the run with a bare exception on the first overflow; the
        # trainer has a rule of its own that says where and why.
        scaler.raise_error_at_min_scale = False
    return engine


def before_update(optimizer: Any, look: Callable[[], None]) -> None:
    """Let `look` run where DeepSpeed's gradients are complete and their update is yet to come:
    within engine.step, which completes them, and before optimizer.step."""
    step = optimizer.step

    def looking(*args: Any, **kwargs: Any) -> Any:
        look()
        return step(*args, **kwargs)

    optimizer.step = looking


def build_optimizer(
    groups: list[dict[str, Any]], config: Mapping[str, Any], adam: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """AdamW: DeepSpeed's CPU kernel for offloaded states, torch's fused one otherwise."""
    offloaded = "offload_optimizer" in config["zero_optimization"]
    compile_kernels(cpu_adam=offloaded)
    if offloaded:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **adam)
    return torch.optim.AdamW(groups, fused=True, **adam)


def compile_kernels(*, cpu_adam: bool = True) -> None:
    """Compile, once a machine and environment, what DeepSpeed compiles at first use: a minute.

    torch guards a build with a file that stays behind where the building process was killed; all
    later ones would then wait for ever. Here the lock is the kernel's, which ends with its holder,
    so a file that is found while holding it is a dead process's.
    """
    accelerator = get_accelerator()
    for name in ("ShareMemCommBuilder", *(["CPUAdamBuilder"] if cpu_adam else [])):
        builder = accelerator.create_op_builder(name)
        if builder is None:
            continue  # an accelerator that has no use for this kernel
        folder = Path(_get_build_directory(builder.name, verbose=False))
        with (folder.parent / f"{builder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
            with redirect_stdout(StringIO()):
                builder.load()


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """The loss scaler's counters, as plain numbers."""
    scaler = optimizer.loss_scaler
    return {name: getattr(scaler, name) for name in SCALER_STATE if hasattr(scaler, name)}


def load_scaler(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Continue from what `scaler_state` returned, where both are dynamic.

    The course of a scale says nothing to another number format, and a fixed one is the config's.
    """
    mine = scaler_state(optimizer)
    if "cur_iter" in mine and mine.keys() == state.keys():
        for name, value in state.items():
            setattr(optimizer.loss_scaler, name, value)


def connect_csv_monitor(
    folder: Path, with_header: list[str]
) -> Callable[[Sequence[tuple[str, float, int]]], None]:
    """DeepSpeed's CSV writer into `folder`: it takes (tag, value, step).

    It puts a header into every file that is new to it; the files `with_header` have one already.
    """
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(folder), job_name=""))
    monitor.filenames.extend(with_header)
    write: Callable[[Sequence[tuple[str, float, int]]], None] = monitor.write_events
    return write
