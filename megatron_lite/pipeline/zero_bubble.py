"""Schedules with a split backward: ZB-H1, ZBV (arXiv:2401.10241) and DualPipeV (DeepSeek-V3).

B, the gradient of the input, keeps the pipeline going; W, that of the weights, waits for nobody
and fills gaps. A whole backward is a B with its W right behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.greedy import (
    arrange,
    backwards_first,
    empty_table,
    forwards_first,
    quickest,
)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B in which rank r is r weight gradients behind; stage i is on rank i.

    Idle (P - 1)(F + B - W), a third of 1F1B's at equal times, for m >= P; at most P micro-batches
    are kept for their F, B or W, as many as the first rank of 1F1B keeps.
    """
    rows = []
    for rank in range(num_ranks):
        warm_up = min(num_ranks - 1 - rank, num_microbatches)
        row = [Action("F", rank, i) for i in range(warm_up)]
        for i in range(num_microbatches):
            if warm_up + i < num_microbatches:
                row.append(Action("F", rank, warm_up + i))
            row.append(Action("B", rank, i))
            if i >= rank:
                row.append(Action("W", rank, i - rank))
        done = max(num_microbatches - rank, 0)
        rows.append(row + [Action("W", rank, i) for i in range(done, num_microbatches)])
    return Schedule.one_way(
        "zb-h1",
        placement=range(num_ranks),
        num_microbatches=num_microbatches,
        actions=rows,
        split_backward=True,
    )


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and up again: rank r holds stages r and 2 P - 1 - r."""
    return (*range(num_ranks), *range(num_ranks)[::-1])


def zbv(num_ranks: int, num_microbatches: int, *, durations: Mapping[Kind, float]) -> Schedule:
    """The quickest of two greedy tables; two half-sized stages a rank in the form of a V.

    Keeps at most 2 P half-sized stages' activations (the memory of 1F1B), from F until W. At equal
    times and m >= P all ranks are busy but for the P - 1 slots at either end.
    """
    empty = empty_table(
        "zbv", [v_placement(num_ranks)], [0] * num_microbatches, split_backward=True
    )
    return quickest(
        (
            arrange(empty, durations=durations, live=2 * num_ranks, rule=rule)
            for rule in (forwards_first, backwards_first)
        ),
        durations,
    )


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DeepSeek's DualPipeV: a V in which the way down and the way up run against each other.

    Forwards and backwards come in pairs that may overlap where a device can run both at once. Only
    where the pipeline empties are backwards split. Keeps at most 2 P + 1 half-sized stages'
    activations until B. Idle at m >= 2 P, with pairs that hand over at their end:
    (P - 1)(F&B + B_full - 3 W) at F = B = W and less elsewhere.
    """
    rows = [_DualPipeRow(num_ranks, rank, num_microbatches).fill() for rank in range(num_ranks)]
    return Schedule.one_way(
        "dualpipev",
        placement=v_placement(num_ranks),
        num_microbatches=num_microbatches,
        actions=rows,
        split_backward=True,
    )


class _DualPipeRow:
    """A rank's row while it is written; work of micro-batches that don't exist is left out."""

    def __init__(self, num_ranks: int, rank: int, num_microbatches: int) -> None:
        self.num_ranks, self.rank, self.num_microbatches = num_ranks, rank, num_microbatches
        self.row: list[Action] = []
        self.deferred: deque[Action] = deque()
        self.count: Counter[tuple[Kind, int]] = Counter()

    def fill(self) -> list[Action]:
        """The phases from the first forward to the last weight gradient."""
        down, up = self.rank, 2 * self.num_ranks - 1 - self.rank
        behind = self.num_ranks - 1 - self.rank
        for _ in range(2 * behind):
            self.forward(down)
        for _ in range(self.rank + 1):
            self.forward(down)
            self.forward(up)
        for _ in range(behind):
            self.backward(up)
            self.forward(up)
        for _ in range(self.num_microbatches - 2 * self.num_ranks + self.rank + 1):
            self.forward(down)
            self.backward(up)
            self.forward(up)
            self.backward(down)
        for _ in range(behind):
            self.backward(up)
            self.forward(up)
            self.backward(down)
        for i in range(2 * (self.rank + 1)):
            self.backward(down if i % 2 else up, split=i > self.rank)
        for _ in range(behind):
            self.weights()
            self.backward(down, split=True)
        while self.deferred:
            self.weights()
        return self.row

    def forward(self, stage: int) -> None:
        """The stage's next forward."""
        self._next("F", stage)

    def backward(self, stage: int, *, split: bool = False) -> None:
        """The stage's next backward: whole, or its weights' part left for later."""
        action = self._next("B", stage)
        if action is None:
            return
        weights = Action("W", stage, action.micro_batch)
        if split:
            self.deferred.append(weights)
        else:
            self.row.append(weights)

    def weights(self) -> None:
        """The weights' part that was left first."""
        if self.deferred:
            self.row.append(self.deferred.popleft())

    def _next(self, kind: Kind, stage: int) -> Action | None:
        micro_batch = self.count[kind, stage]
        if micro_batch == self.num_microbatches:
            return None
        self.count[kind, stage] += 1
        action = Action(kind, stage, micro_batch)
        self.row.append(action)
        return action
