"""Schedules with a split backward: ZB-H1, ZBV (arXiv:2401.10241) and DualPipeV (DeepSeek-V3).

B, the gradient of the input, keeps the pipeline going; W, that of the weights, waits for nobody
and fills gaps. A whole backward is a B with its W right behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from megatron_lite.pipeline.actions import Action, Kind, Schedule


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


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two half-sized stages a rank, with the memory of 1F1B and next to no bubble.

    Keeps at most 2 P half-sized stages' activations from F until W. At equal times and m >= 2 P a
    rank is idle for P - 1 of its slots, those in which the first micro-batch is on its way to it
    and the last one on its way back.
    """
    return _v_schedule("zbv", num_ranks, num_microbatches, _fill_zbv)


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DeepSeek's DualPipeV: a V in which the way down and the way up run against each other.

    Forwards and backwards come in pairs that may overlap where a device can run both at once. Only
    where the pipeline empties are backwards split. Keeps at most 2 P + 1 half-sized stages'
    activations until B. Idle at m >= 2 P, were a pair (a forward and, right behind it, the backward
    of the rank's other stage) to hand both results over at its end:
    (P - 1)(F&B + B_full - 3 W) at F = B = W and less at other times that tests try. The forward's
    result goes ahead of the backward here, which leaves half of that at F = B = W.
    """
    return _v_schedule("dualpipev", num_ranks, num_microbatches, _fill_dualpipev)


class _VRow:
    """A rank's row while it is written; work of micro-batches that don't exist is left out."""

    def __init__(self, num_ranks: int, rank: int, num_microbatches: int) -> None:
        self.num_ranks, self.rank, self.num_microbatches = num_ranks, rank, num_microbatches
        self.down, self.up = rank, 2 * num_ranks - 1 - rank
        self.behind = num_ranks - 1 - rank
        self.actions: list[Action] = []
        self.deferred: deque[Action] = deque()
        self.count: Counter[tuple[Kind, int]] = Counter()

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
            self.actions.append(weights)

    def weights(self) -> None:
        """The weights' part that was left first."""
        if self.deferred:
            self.actions.append(self.deferred.popleft())

    def _next(self, kind: Kind, stage: int) -> Action | None:
        micro_batch = self.count[kind, stage]
        if micro_batch == self.num_microbatches:
            return None
        self.count[kind, stage] += 1
        action = Action(kind, stage, micro_batch)
        self.actions.append(action)
        return action


def _v_schedule(
    name: str, num_ranks: int, num_microbatches: int, fill: Callable[[_VRow], None]
) -> Schedule:
    rows = []
    for rank in range(num_ranks):
        row = _VRow(num_ranks, rank, num_microbatches)
        fill(row)
        while row.deferred:
            row.weights()
        rows.append(row.actions)
    return Schedule.one_way(
        name,
        placement=v_placement(num_ranks),
        num_microbatches=num_microbatches,
        actions=rows,
        split_backward=True,
    )


def _fill_zbv(row: _VRow) -> None:
    """Forwards until 2 P are kept; then a forward for each backward; at last W where B is late."""
    for _ in range(2 * row.behind + 1):
        row.forward(row.down)
    for _ in range(row.rank):
        row.forward(row.up)
        row.forward(row.down)
    for _ in range(row.behind + 1):
        row.forward(row.up)
        row.backward(row.up)
    while row.count["F", row.up] < row.num_microbatches:
        row.forward(row.down)
        row.backward(row.down)
        row.forward(row.up)
        row.backward(row.up)
    for _ in range(row.rank):
        row.backward(row.down, split=True)
        row.backward(row.up, split=True)
    for _ in range(row.behind + 1):
        row.backward(row.down, split=True)
        row.weights()


def _fill_dualpipev(row: _VRow) -> None:
    """Forwards; from the turning point on pairs of a forward and a backward; at last split ones."""
    for _ in range(2 * row.behind):
        row.forward(row.down)
    for _ in range(row.rank + 1):
        row.forward(row.down)
        row.forward(row.up)
    for _ in range(row.behind):
        row.backward(row.up)
        row.forward(row.up)
    for _ in range(row.num_microbatches - 2 * row.num_ranks + row.rank + 1):
        row.forward(row.down)
        row.backward(row.up)
        row.forward(row.up)
        row.backward(row.down)
    for _ in range(row.behind):
        row.backward(row.up)
        row.forward(row.up)
        row.backward(row.down)
    for i in range(2 * (row.rank + 1)):
        row.backward(row.down if i % 2 else row.up, split=i > row.rank)
    for _ in range(row.behind):
        row.weights()
        row.backward(row.down, split=True)
