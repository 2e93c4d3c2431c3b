"""What is in memory when an action begins, by weak references, and what a table allows to be there.

Graphs, outputs that are sent or handed over, and second halves of backwards; nothing is asked of
the executor's own books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.executor import Compute, Root
from megatron_lite.pipeline.verify import execution_order
from tests.random_tables import inputs

Key = tuple[int, int]
"""Stage and micro-batch."""


class Token:
    """Lives as long as a graph that it was put into."""


class _Mark(Function):
    """A copy that no graph keeps for its backward; its node holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clone(), None


@dataclass(frozen=True)
class Alive:
    """What is there as `action` begins."""

    action: Action
    graphs: frozenset[Key]
    outputs: frozenset[Key]
    """Of stages before the last one."""
    halves: frozenset[Key]
    """Of backwards whose weight gradients wait."""


class Traced:
    """A meaning of actions that looks at memory before each, and computes as `inner` does.

    `row` is this rank's; it begins anew at its end, as a run's next step does.
    """

    def __init__(self, inner: Compute, schedule: Schedule, rank: int) -> None:
        self.inner, self.last = inner, schedule.num_stages - 1
        self.coming = cycle(schedule.actions[rank])
        self.seen: list[Alive] = []
        self._graphs: dict[Key, ReferenceType[Token]] = {}
        self._outputs: dict[Key, StorageWeakRef] = {}
        self._halves: dict[Key, list[ReferenceType[Any]]] = {}

    def forward(self, stage: int, batch: Any, hidden: Tensor | None) -> Tensor:
        key, token = self._begin("F"), Token()
        assert key[0] == stage
        self._graphs[key] = ref(token)
        given = None if hidden is None else _Mark.apply(hidden, token)
        output: Tensor = _Mark.apply(self.inner.forward(stage, batch, given), token)
        if stage < self.last:
            self._outputs[key] = StorageWeakRef(output.untyped_storage())
        return output

    def backward(self, output: Root, gradient: Tensor) -> None:
        self._begin("B")
        self.inner.backward(output, gradient)

    def backward_input(self, output: Root, gradient: Tensor) -> Any:
        key = self._begin("B")
        waiting = self.inner.backward_input(output, gradient)
        self._halves[key] = [ref(half) for half in waiting]
        return waiting

    def backward_weight(self, waiting: Any) -> None:
        self._begin("W")
        self.inner.backward_weight(waiting)

    def _begin(self, kind: str) -> Key:
        action = next(self.coming)
        assert action.kind == kind
        self.seen.append(Alive(action, *self.now()))
        return action.stage, action.micro_batch

    def now(self) -> tuple[frozenset[Key], frozenset[Key], frozenset[Key]]:
        """Graphs, outputs and halves that are in memory."""
        return (
            frozenset(key for key, token in self._graphs.items() if token() is not None),
            frozenset(key for key, storage in self._outputs.items() if not storage.expired()),
            frozenset(
                key for key, halves in self._halves.items() if any(half() for half in halves)
            ),
        )


def allowed(schedule: Schedule, rank: int) -> Iterator[Alive]:
    """What may be in memory as each action of a rank begins.

    An output that is sent is needed until this rank can know that it has been received, one that
    is handed over until the next stage's last use of its input.
    """
    row, past, last = schedule.actions[rank], _past(schedule), schedule.kinds[-1]
    for place, action in enumerate(row):
        done = set(row[:place])
        keys = {kind: {(a.stage, a.micro_batch) for a in done if a.kind == kind} for kind in "FBW"}

        def needed(key: Key, done: set[Action] = done, before: Action = action) -> bool:
            taker = Action("F", key[0] + 1, key[1])
            if schedule.rank_of(taker.stage, taker.micro_batch) == rank:
                return Action(last, taker.stage, taker.micro_batch) not in done
            return taker not in past[before]

        sent = {key for key in keys["F"] if key[0] < schedule.num_stages - 1}
        halves = keys["B"] - keys["W"] if schedule.split_backward else set()
        yield Alive(
            action,
            frozenset(keys["F"] - keys["B"]),
            frozenset(filter(needed, sent)),
            frozenset(halves),
        )


def _past(schedule: Schedule) -> dict[Action, set[Action]]:
    """For each action all that must have run before it begins, on any rank."""
    found: dict[Action, set[Action]] = {}
    before: list[set[Action]] = [set() for _ in range(schedule.num_ranks)]
    for rank, action in execution_order(schedule):
        direct = inputs(action, schedule.num_stages)
        found[action] = before[rank].union(direct, *(found[a] for a in direct))
        before[rank] = found[action] | {action}
    return found


def assert_freed(schedule: Schedule, rank: int, seen: Sequence[Alive]) -> None:
    """Exactly the graphs and halves that are needed are there, and no output longer than allowed;
    `seen` may be that of several steps."""
    expected = list(allowed(schedule, rank))
    assert len(seen) % len(expected) == 0 and seen
    for found, may in zip(seen, cycle(expected), strict=False):
        where = f"{schedule.name}, rank {rank}, {may.action}"
        assert found.action == may.action, where
        _compare(found.graphs, may.graphs, f"{where}: graphs")
        _compare(found.halves, may.halves, f"{where}: second halves")
        _compare(found.outputs, may.outputs & found.outputs, f"{where}: outputs")


def _compare(found: frozenset[Key], expected: frozenset[Key], where: str) -> None:
    late, gone = sorted(found - expected), sorted(expected - found)
    assert found == expected, f"{where}: {late} are still there, {gone} are gone"


def peak(seen: Sequence[Alive], count: Callable[[Alive], int]) -> int:
    """The most of `count` that was there at a time, with what a forward adds to it."""
    return max(count(alive) + (alive.action.kind == "F") for alive in seen)
