"""The learning rate as a pure function of the number of applied optimizer updates.

Megatron's shapes. Holds no state, so nothing of it is saved in a checkpoint; knows neither
optimizers nor iterations. Called by the trainer before each step and for the log.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.config.sections.optimizer import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, *, update: int, total_updates: int) -> float:
    """The rate of update number `update`, counted from 1; before batch scaling.

    Skipped steps are no updates: after n applied ones the next uses `update=n + 1`, and
    `update=n` is the rate to log. 0 is legal: the start of the curve, before any update.
    With a warm-up of w updates the first has lr/w and update w has lr. From there the rate falls
    to min_lr, which it has from update `lr_decay_iters` (null: `total_updates`) on.

    Source: the formulas of Megatron-LM's OptimizerParamScheduler. Its logged rates are the same;
    there the very first update runs at rate 0 and each later one an update behind the log.
    Raises ValueError for a negative `update`.
    """
    if update < 0:
        raise ValueError(f"update must be at least 0, got {update}")
    decay = optimizer.lr_decay_iters or total_updates
    warm_up = _warm_up_updates(optimizer, decay)
    if update <= warm_up and warm_up > 0:
        return optimizer.lr * update / warm_up
    if optimizer.lr_decay_style == "constant":
        return optimizer.lr
    if update > decay:
        return optimizer.min_lr
    if optimizer.lr_decay_style == "inverse-square-root":
        return max(optimizer.min_lr, optimizer.lr * math.sqrt(max(warm_up, 1) / max(update, 1)))
    share = _decay_share(optimizer, update=update, warm_up=warm_up, decay=decay)
    return optimizer.min_lr + share * (optimizer.lr - optimizer.min_lr)


def batch_scaling_factor(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    """The factor on every rate, lr and min_lr alike, that `lr_batch_scaling` asks for; else 1.

    With k = global_batch_size / base_global_batch_size: k for "linear" (arXiv:1706.02677), √k for
    "sqrt" (arXiv:1904.00962).
    """
    scaling = optimizer.lr_batch_scaling
    if scaling is None:
        return 1.0
    ratio = global_batch_size / scaling.base_global_batch_size
    return ratio if scaling.rule == "linear" else math.sqrt(ratio)


def scaled_peak_lr(optimizer: OptimizerConfig, global_batch_size: int) -> float:
    """The largest rate of the run: `lr` after batch scaling."""
    return optimizer.lr * batch_scaling_factor(optimizer, global_batch_size)


def _warm_up_updates(optimizer: OptimizerConfig, decay: int) -> float:
    """Length of the warm-up; a fraction need not give a whole number (as in Megatron)."""
    if optimizer.lr_warmup_fraction is not None:
        return optimizer.lr_warmup_fraction * decay
    return optimizer.lr_warmup_iters


def _decay_share(optimizer: OptimizerConfig, *, update: int, warm_up: float, decay: int) -> float:
    """What is left of lr - min_lr, from 1 to 0, for warm_up < update <= decay or no warm-up."""
    if optimizer.lr_decay_style == "WSD":
        anneal = optimizer.lr_wsd_decay_iters
        if anneal is None:
            raise ValueError("lr_decay_style WSD needs lr_wsd_decay_iters")
        passed = max(0.0, (update - (decay - anneal)) / anneal)
        return 2.0 * math.pow(0.5, passed) - 1.0
    passed = (update - warm_up) / (decay - warm_up)
    if optimizer.lr_decay_style == "linear":
        return 1.0 - passed
    return 0.5 * (math.cos(math.pi * passed) + 1.0)
