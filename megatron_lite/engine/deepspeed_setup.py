"""What both ZeRO engines ask of DeepSpeed: initialisation, the Adam that fits, the loss scaler.

The one file that imports deepspeed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from megatron_lite.mpu.groups import DeepSpeedMpu

_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


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


def build_optimizer(
    groups: list[dict[str, Any]], config: Mapping[str, Any], adam: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """AdamW: DeepSpeed's CPU kernel for offloaded states, torch's fused one otherwise."""
    if "offload_optimizer" in config["zero_optimization"]:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **adam)
    return torch.optim.AdamW(groups, fused=True, **adam)


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """The loss scaler's counters, as plain numbers."""
    scaler = optimizer.loss_scaler
    return {name: getattr(scaler, name) for name in _SCALER_STATE if hasattr(scaler, name)}


def load_scaler(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Continue from what `scaler_state` returned."""
    for name, value in state.items():
        if hasattr(optimizer.loss_scaler, name):
            setattr(optimizer.loss_scaler, name, value)
