"""RunConfig to the complete, explicit configuration of DeepSpeed 0.19.8; one direction.

The engines pass their own optimizer and hand gradients over once a step, so DeepSpeed neither
builds an optimizer nor accumulates. Imports no deepspeed; called by the engines and by `render`.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config.schema import PrecisionConfig, RunConfig, ZeroOptimization

NEVER = 2**31 - 1
"""Steps between DeepSpeed's own progress lines: the run's log has the same facts."""


def deepspeed_config(cfg: RunConfig, dp: int) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize(config=...)` at data-parallel size `dp`.

    The batch sizes describe one hand-over: a micro-batch from each data-parallel rank, no
    accumulation.
    """
    micro_batch_size = cfg.training.micro_batch_size
    config: dict[str, Any] = {
        "train_batch_size": micro_batch_size * dp,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": cfg.training.clip_grad,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": False,
        "fp16": _fp16(cfg.precision),
        # Without check_grad_overflow a bf16 step with non-finite gradients would be taken; fp32
        # has no such switch, its step always looks at the norm.
        "bf16": {"enabled": cfg.precision.dtype == "bf16", "check_grad_overflow": True},
        "zero_optimization": _zero(cfg.deepspeed.zero_optimization, dp),
        "aio": cfg.deepspeed.aio.model_dump(mode="json"),
        "wall_clock_breakdown": cfg.deepspeed.wall_clock_breakdown,
        "steps_per_print": NEVER,
        "log_level": cfg.logging.deepspeed_log_level,
    }
    if cfg.deepspeed.comms_logger.enabled:
        config["comms_logger"] = cfg.deepspeed.comms_logger.model_dump(mode="json")
    return config


def _fp16(precision: PrecisionConfig) -> dict[str, Any]:
    """DeepSpeed's block for fp16; a loss_scale of 0 is its word for dynamic."""
    scale = precision.loss_scale
    return {
        "enabled": precision.dtype == "fp16",
        "auto_cast": False,
        "loss_scale": 0 if scale == "dynamic" else scale,
        "initial_scale_power": precision.initial_loss_scale.bit_length() - 1,
        "loss_scale_window": precision.loss_scale_window,
        "hysteresis": precision.hysteresis,
        "consecutive_hysteresis": False,
        "min_loss_scale": precision.min_loss_scale,
    }


def _zero(zero: ZeroOptimization, dp: int) -> dict[str, Any]:
    """DeepSpeed's block for ZeRO; offload to nowhere is told by leaving it out."""
    config = zero.model_dump(mode="json")
    if dp == 1 and zero.stage < 3:
        # One rank has nothing to reduce, but would still copy every gradient into a bucket and
        # divide it by one. A gradient that is larger than the bucket is taken where it lies.
        config |= {"reduce_scatter": False, "reduce_bucket_size": 1}
    # Clipping, the logged norm and the skipping of non-finite fp32 steps all read the norm.
    config["compute_grad_norm"] = True
    for offload in ("offload_optimizer", "offload_param"):
        if config[offload]["device"] == "none":
            del config[offload]
    return config
