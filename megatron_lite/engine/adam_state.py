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
