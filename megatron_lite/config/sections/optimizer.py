"""`optimizer`: AdamW and its learning rate. The formulas are in `engine.lr_schedule`."""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import (
    DERIVE,
    Decay,
    Derived,
    Fraction,
    Number,
    PositiveNumber,
    PositiveWhole,
    Section,
    Whole,
)


class LrBatchScaling(Section):
    """Scales the learning rate with the global batch size."""

    rule: Literal["sqrt", "linear"]
    """Factor on lr: the root of, or the plain ratio, global batch size / base_global_batch_size."""

    base_global_batch_size: PositiveWhole
    """Samples a step at which lr holds unscaled."""


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: Number
    """Largest learning rate, reached after warm-up."""

    min_lr: Number = 0.0
    """Learning rate at the end of the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Way from lr to min_lr after warm-up; WSD is flat until its last lr_wsd_decay_iters steps."""

    lr_decay_iters: Derived[PositiveWhole] = DERIVE
    """Optimizer steps until min_lr is reached. null: the whole run."""

    lr_warmup_iters: Whole = 0
    """Optimizer steps of the linear climb from 0 to lr. 0: none. Give this or
    lr_warmup_fraction."""

    lr_warmup_fraction: Fraction | None = None
    """Warm-up as a share of lr_decay_iters. null: lr_warmup_iters counts."""

    lr_wsd_decay_iters: PositiveWhole | None = None
    """Optimizer steps of the final decay of WSD; needed with it and refused without it."""

    weight_decay: Number = 0.01
    """Decoupled weight decay; biases and norms have none."""

    adam_beta1: Decay = 0.9
    """Decay rate of the running mean of the gradient."""

    adam_beta2: Decay = 0.999
    """Decay rate of the running mean of the squared gradient."""

    adam_eps: PositiveNumber = 1e-8
    """Added to the root of the second moment."""

    lr_batch_scaling: LrBatchScaling | None = None
    """Scales lr and min_lr with the global batch size. null: no scaling."""
