"""The vocabulary of a pipeline schedule: actions, and a table of them for each rank.

Holds no behaviour of any particular schedule and moves no tensors. Written by schedules.py, read
by messages.py, verify.py, simulate.py and the executor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B"]


class ScheduleError(ValueError):
    """A schedule cannot be built or run; the message names the rank, the action and the reason."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one rank: F (forward) or B (backward) of a micro-batch on a stage.

    `stage` counts model parts from the embedding (0) to the head; `micro_batch` counts from 0
    within one training step. Actions are values: equal fields mean the same action.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every pipeline rank does in one step, in its own order.

    `actions[rank]` is the list that rank runs from left to right. `stage_rank[stage]` is the rank
    that holds the stage; a rank may hold several. `forward_only` declares a table without backward
    actions (evaluation). Nothing here is checked: verify.verify does that.
    """

    name: str
    num_stages: int
    num_ranks: int
    num_microbatches: int
    stage_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that each (stage, micro-batch) needs once, in the order of need."""
        return ("F",) if self.forward_only else ("F", "B")
