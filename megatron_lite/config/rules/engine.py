"""Number formats and ZeRO: which combinations the engines run, which keys they would not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.config.errors import NO_VALUE, Problem
from megatron_lite.config.rules.common import (
    Rule,
    WorldRule,
    data_parallel_size,
    nearest_multiples,
    without_effect,
)
from megatron_lite.config.schema import (
    Aio,
    OffloadOptimizer,
    OffloadParam,
    PrecisionConfig,
    RunConfig,
    ZeroOptimization,
)

ZERO = "deepspeed.zero_optimization"
DYNAMIC_KEYS = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
STAGE3_KEYS: tuple[str, ...] = (
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
BELOW_STAGE3_KEYS: tuple[str, ...] = ("allgather_bucket_size", "round_robin_gradients")
NVME_OPTIMIZER_KEYS = ("buffer_count", "pipeline_read", "pipeline_write", "fast_init")
NVME_PARAM_KEYS = ("buffer_count", "buffer_size", "max_in_cpu")


def loss_scale_is_read(cfg: RunConfig) -> Iterator[Problem]:
    """Only fp16 has a loss scale, and only a dynamic one has a course."""
    precision = cfg.precision
    if precision.dtype != "fp16":
        names, why = ("loss_scale", *DYNAMIC_KEYS), f'with "dtype": "{precision.dtype}"'
        yield from without_effect(precision, PrecisionConfig, names, "precision", why)
    elif precision.loss_scale != "dynamic":
        why = f"beside the fixed loss_scale {precision.loss_scale:g}"
        yield from without_effect(precision, PrecisionConfig, DYNAMIC_KEYS, "precision", why)


def loss_scale_starts_at_a_power_of_two(cfg: RunConfig) -> Iterator[Problem]:
    """DeepSpeed takes the exponent of the first scale."""
    first, path = cfg.precision.initial_loss_scale, "precision.initial_loss_scale"
    if first & (first - 1):
        below = 1 << (first.bit_length() - 1)
        yield Problem(path, first, "must be a power of two", f"use {below} or {2 * below}")
    lowest = cfg.precision.min_loss_scale
    if first < lowest:
        rule = f"must be at least precision.min_loss_scale {lowest}"
        yield Problem(path, first, rule, f"use {1 << (lowest - 1).bit_length()}")


def zero_stage_is_supported(cfg: RunConfig) -> Iterator[Problem]:
    """Stages 1 and 2 run with any layout, stage 3 without a pipeline."""
    stage = cfg.deepspeed.zero_optimization.stage
    if stage == 0:
        rule = "must be 1, 2 or 3: stage 1 is the same update with less memory"
        yield Problem(f"{ZERO}.stage", stage, rule, "use 1")
    pp = cfg.parallel.pipeline_model_parallel_size
    if stage == 3 and pp > 1:
        rule = (
            f"cannot run with parallel.pipeline_model_parallel_size {pp}: "
            "ZeRO-3 gathers weights in one forward pass of the whole model"
        )
        nearest = "use stage 1 or 2, or pipeline_model_parallel_size 1"
        yield Problem(f"{ZERO}.stage", stage, rule, nearest)
    schedule = cfg.parallel.pipeline_schedule
    if stage == 3 and schedule not in ("1f1b", "gpipe"):
        rule = "cannot run with ZeRO stage 3, which keeps the model in one piece"
        yield Problem("parallel.pipeline_schedule", schedule, rule, "use 1f1b or gpipe")


def zero_keys_are_read(cfg: RunConfig) -> Iterator[Problem]:
    """Keys that belong to other stages would be dead."""
    zero: Any = cfg.deepspeed.zero_optimization
    stage = zero.stage
    others = BELOW_STAGE3_KEYS if stage == 3 else STAGE3_KEYS
    yield from without_effect(zero, ZeroOptimization, others, ZERO, f"with stage {stage}")
    if zero.overlap_comm and stage != 2:
        rule = f"works with stage 2 only, where gradients are handed over at once; stage is {stage}"
        yield Problem(f"{ZERO}.overlap_comm", True, rule, "use false, or stage 2")


def gradients_keep_their_order(cfg: RunConfig, world_size: int) -> Iterator[Problem]:
    """A checkpoint would hold each parameter's optimizer states under the name of another."""
    replicas = data_parallel_size(cfg, world_size)
    if cfg.deepspeed.zero_optimization.round_robin_gradients and replicas > 1:
        rule = (
            f"cannot be used at data-parallel size {replicas}: DeepSpeed reorders the parameters, "
            "but looks for their optimizer states in the first order"
        )
        yield Problem(f"{ZERO}.round_robin_gradients", True, rule, "use false")


def gather_bucket_is_even(cfg: RunConfig) -> Iterator[Problem]:
    """DeepSpeed aligns buckets to two elements."""
    size = cfg.deepspeed.zero_optimization.allgather_bucket_size
    if size % 2:
        path = f"{ZERO}.allgather_bucket_size"
        yield Problem(path, size, "must be even", f"use {nearest_multiples(size, 2)}")


def optimizer_offload_is_supported(cfg: RunConfig) -> Iterator[Problem]:
    """Disks and partial offload belong to stage 3."""
    offload, path = cfg.deepspeed.zero_optimization.offload_optimizer, f"{ZERO}.offload_optimizer"
    yield from _disk_keys(offload, OffloadOptimizer, NVME_OPTIMIZER_KEYS, path)
    device, stage = offload.device, cfg.deepspeed.zero_optimization.stage
    if device == "nvme" and stage != 3:
        rule = f"nvme needs stage 3; stage is {stage}"
        yield Problem(f"{path}.device", device, rule, 'use "cpu", or stage 3')
    if device == "none":
        names, why = ("pin_memory", "ratio"), 'with "device": "none"'
        yield from without_effect(offload, OffloadOptimizer, names, path, why)
    elif stage != 3:
        yield from without_effect(
            offload, OffloadOptimizer, ("ratio",), path, f"with stage {stage}, which offloads all"
        )


def parameter_offload_is_supported(cfg: RunConfig) -> Iterator[Problem]:
    """Only stage 3 has weights to offload."""
    offload, path = cfg.deepspeed.zero_optimization.offload_param, f"{ZERO}.offload_param"
    yield from _disk_keys(offload, OffloadParam, NVME_PARAM_KEYS, path)
    device, stage = offload.device, cfg.deepspeed.zero_optimization.stage
    if device != "none" and stage != 3:
        rule = f"needs stage 3, which alone cuts weights; stage is {stage}"
        yield Problem(f"{path}.device", device, rule, 'use "none", or stage 3')
    if device == "none":
        why = 'with "device": "none"'
        yield from without_effect(offload, OffloadParam, ("pin_memory",), path, why)


def _disk_keys(
    offload: Any, section: type[OffloadOptimizer | OffloadParam], names: tuple[str, ...], path: str
) -> Iterator[Problem]:
    """Disk offload needs an absolute folder; nothing else may name one."""
    folder = offload.nvme_path
    if offload.device != "nvme":
        why = f'with "device": "{offload.device}"'
        yield from without_effect(offload, section, ("nvme_path", *names), path, why)
    elif folder is None:
        yield Problem(f"{path}.nvme_path", NO_VALUE, 'is required with "device": "nvme"')
    elif not folder.startswith("/"):
        rule = "must be an absolute folder: it lies on each node's own disk"
        yield Problem(f"{path}.nvme_path", folder, rule)


def disk_settings_are_read(cfg: RunConfig) -> Iterator[Problem]:
    """`aio` tunes disk offload."""
    zero = cfg.deepspeed.zero_optimization
    if "nvme" not in (zero.offload_optimizer.device, zero.offload_param.device):
        names = tuple(Aio.model_fields)
        yield from without_effect(cfg.deepspeed.aio, Aio, names, "deepspeed.aio", "without nvme")


RULES: tuple[Rule, ...] = (
    loss_scale_is_read,
    loss_scale_starts_at_a_power_of_two,
    zero_stage_is_supported,
    zero_keys_are_read,
    gather_bucket_is_even,
    optimizer_offload_is_supported,
    parameter_offload_is_supported,
    disk_settings_are_read,
)
WORLD_RULES: tuple[WorldRule, ...] = (gradients_keep_their_order,)
