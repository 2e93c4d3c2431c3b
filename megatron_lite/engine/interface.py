"""What the trainer and checkpoints know of an engine; both ZeRO engines offer it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.pipeline.executor import Compute

SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's dynamic loss scaler continues from, by its names."""


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did."""

    applied: bool
    """False where non-finite gradients made all ranks skip the step."""
    grad_norm: float | None
    """Global 2-norm before clipping, each logical element counted once; inf where not finite, None
    where the step was given up before."""
    loss_scale: float
    """The scale for the next step (1 unless fp16)."""


class Working(NamedTuple):
    """The working weights that one rank holds of one of its parameters."""

    parameter: nn.Parameter
    values: Tensor
    part: int | None
    """Which data-parallel part of the parameter it is; None: all of it."""


class Engine(Compute, Protocol):
    """Forward, backward and optimizer step of one rank; gradients add up until `step`."""

    on_gradients: Callable[[Iterator[Fragment]], None] | None
    """Called within `step`, before the update, with the averaged gradients that this rank owns, as
    fragments with the state `grad`, times the loss scale."""

    @property
    def loss_scale(self) -> float:
        """Factor on losses before the backward; 1 unless fp16."""

    def begin_step(self, num_microbatches: int, *, diagnose: bool = False) -> None:
        """Forget gradients of an earlier step; with `diagnose` look for non-finite ones."""

    def nonfinite_parameter(self) -> str | None:
        """Logical name of this rank's first non-finite gradient of a step that was diagnosed."""

    def step(self, lr: float) -> StepOutcome:
        """Average over data-parallel ranks, clip, update, on all ranks or on none."""

    def give_up_step(self) -> StepOutcome:
        """End a step without an update, on all ranks: gradients are dropped, nothing else moves."""

    def working(self) -> Iterator[Working]:
        """What forwards read, parameter by parameter."""

    def fragments(self) -> Iterator[Fragment]:
        """The optimizer states that this rank owns; before the first update the moments are 0."""

    def refresh(self) -> None:
        """Make the working weights follow master weights that were written through fragments."""

    def scalars(self) -> dict[str, Any]:
        """State that all ranks share: applied updates, loss scaler."""

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Continue from what `scalars` returned."""

    def train(self, mode: bool) -> None:
        """Switch dropout on or off."""

    def modules(self) -> Mapping[int, nn.Module]:
        """The stages of this rank."""

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers."""
