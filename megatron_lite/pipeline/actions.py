"""The vocabulary of a pipeline schedule: actions, and a table of them for each rank.

Holds no behaviour of any particular schedule and moves no tensors. Written by schedules.py, read
by messages.py, verify.py, simulate.py and the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "W"]


class ScheduleError(ValueError):
    """A schedule cannot be built or run; the message names the rank, the action and the reason."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one rank on a micro-batch and a stage.

    F is the forward. B is the whole backward, or, in a schedule that splits it, the gradient of
    the stage's input, and W that of its weights. `stage` counts model parts from the embedding (0)
    to the head; `micro_batch` counts from 0 within one training step. Actions are values: equal
    fields mean the same action.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every pipeline rank does in one step, in its own order.

    `actions[rank]` is the list that rank runs from left to right. Micro-batch i runs in direction
    `directions[i]`, and `placements[direction][stage]` is the rank that holds the stage for it;
    a rank may hold several stages, and a stage may be on a rank for each direction. With
    `split_backward` every backward is a B and a W; a W right behind its B is a backward in one
    piece. `forward_only` declares a table without backward actions (evaluation). Nothing here is
    checked: verify.verify does that.
    """

    name: str
    num_stages: int
    num_ranks: int
    num_microbatches: int
    placements: tuple[tuple[int, ...], ...]
    directions: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    split_backward: bool = False
    forward_only: bool = False

    @classmethod
    def one_way(
        cls,
        name: str,
        *,
        placement: Sequence[int],
        num_microbatches: int,
        actions: Sequence[Sequence[Action]],
        split_backward: bool = False,
        forward_only: bool = False,
    ) -> Schedule:
        """A schedule of one direction: stage s is on rank placement[s] for every micro-batch."""
        return cls(
            name=name,
            num_stages=len(placement),
            num_ranks=len(actions),
            num_microbatches=num_microbatches,
            placements=(tuple(placement),),
            directions=(0,) * num_microbatches,
            actions=tuple(tuple(row) for row in actions),
            split_backward=split_backward,
            forward_only=forward_only,
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that each (stage, micro-batch) needs once, in the order of need."""
        if self.forward_only:
            return ("F",)
        return ("F", "B", "W") if self.split_backward else ("F", "B")

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that runs the actions of `stage` for `micro_batch`."""
        return self.placements[self.directions[micro_batch]][stage]

    def held_by(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (direction, stage) pairs whose parts of the model `rank` holds, in order."""
        return tuple(
            (direction, stage)
            for direction, placement in enumerate(self.placements)
            for stage, home in enumerate(placement)
            if home == rank
        )
