"""`precision`: number formats, fp16's loss scale, when to give up on non-finite gradients."""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import Flag, LossScale, PositiveWhole, Section


class PrecisionConfig(Section):
    """Number formats and the loss scale."""

    dtype: Literal["fp32", "fp16", "bf16"] = "bf16"
    """Format of weights, activations and gradients; the optimizer keeps fp32 master weights in
    every case."""

    loss_scale: LossScale = "dynamic"
    """fp16 only. "dynamic": adapted to overflows; a number: fixed."""

    initial_loss_scale: PositiveWhole = 65536
    """First value of the dynamic loss scale, a power of two."""

    min_loss_scale: PositiveWhole = 1
    """Lower bound of the dynamic loss scale."""

    loss_scale_window: PositiveWhole = 1000
    """Steps without overflow after which the dynamic loss scale doubles, at the next one (as in
    DeepSpeed)."""

    hysteresis: PositiveWhole = 2
    """Overflows after which the dynamic loss scale halves. 1: at the first one."""

    accumulate_grads_in_fp32: Flag = True
    """Sum the gradients of the micro-batches in fp32; they are rounded to `dtype` once, at the
    optimizer step."""

    tf32: Flag = False
    """Let GPUs multiply fp32 matrices in TF32 (10-bit mantissa)."""

    max_consecutive_nonfinite_steps: PositiveWhole = 10
    """The run stops after this many skipped steps in a row that a lower loss scale cannot cure:
    with a dynamic scale those with a non-finite loss and those at min_loss_scale; every skipped
    step with a fixed scale, bf16 or fp32."""
