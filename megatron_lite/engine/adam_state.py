"""Adam's state, in the types of the two optimizers that are used: torch's and DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first_state(optimizer: torch.optim.Optimizer, partition: Tensor) -> dict[str, Any]:
    """The state of a parameter before its first update, which both create only then."""
    counted_by_tensor = isinstance(optimizer, torch.optim.AdamW)
    return {
        "step": torch.zeros((), device=partition.device) if counted_by_tensor else 0,
        "exp_avg": torch.zeros_like(partition),
        "exp_avg_sq": torch.zeros_like(partition),
    }


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the number of updates of every state."""
    for state in optimizer.state.values():
        if isinstance(state["step"], Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step


def steps_done(optimizer: torch.optim.Optimizer) -> int:
    """The number of updates that the states have seen."""
    return max(int(state["step"]) for state in optimizer.state.values())


def forget_powers(optimizer: torch.optim.Optimizer) -> None:
    """Let the coming update compute β₁ᵗ and β₂ᵗ from t alone; call it before every step.

    DeepSpeed's CPU kernel multiplies up a running product instead. It is a little off the power,
    and a resumed run, which starts with the power, would not repeat the unbroken run bit for bit. A
    step that follows no earlier one, here on a dummy, makes the kernel start over. torch's Adam has
    no such memory.
    """
    kernel, number = (getattr(optimizer, name, None) for name in ("ds_opt_adam", "opt_id"))
    if kernel is None:
        return
    (beta1, beta2), eps = optimizer.defaults["betas"], optimizer.defaults["eps"]
    dummies = [torch.zeros(1) for _ in range(4)]
    jump = steps_done(optimizer) + 2
    kernel.adam_update(number, jump, 0.0, beta1, beta2, eps, 0.0, True, *dummies)
