"""Arranges a table by simulated time: a rank that is free starts the best action that it can run.

A list scheduler for schedules without a closed form. Pure and without chance: the same sizes, times
and rule give the same table. Backwards are not split. Called by chimera.py.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from megatron_lite.pipeline.actions import Action, Kind, Schedule, ScheduleError
from megatron_lite.pipeline.messages import consumer
from megatron_lite.pipeline.simulate import check_times, simulate

Rule = Callable[[Kind, int, int], tuple[int, ...]]
"""(kind, stage, turn: the micro-batch's number within its direction) → the smallest comes first."""


def forwards_first(kind: Kind, stage: int, turn: int) -> tuple[int, ...]:
    """Forwards while there is room, the deepest stage first; of backwards the shallowest stage."""
    return (0, -stage, turn) if kind == "F" else (1, stage, turn)


def backwards_first(kind: Kind, stage: int, turn: int) -> tuple[int, ...]:
    """Backwards, then forwards, the oldest micro-batch first."""
    return (0 if kind == "B" else 1), turn, stage


def empty_table(
    name: str, placements: Sequence[Sequence[int]], directions: Sequence[int]
) -> Schedule:
    """A schedule without actions: what is to be arranged."""
    ranks = max(max(placement) for placement in placements) + 1
    return Schedule(
        name=name,
        num_stages=len(placements[0]),
        num_ranks=ranks,
        num_microbatches=len(directions),
        placements=tuple(tuple(placement) for placement in placements),
        directions=tuple(directions),
        actions=((),) * ranks,
    )


def arrange(empty: Schedule, *, durations: Mapping[Kind, float], live: int, rule: Rule) -> Schedule:
    """Fills the rows of `empty`; messages take no time.

    A rank keeps at most `live` (stage, micro-batch) pairs whose forward has started and whose
    backward has not. `live` must be at least the number of parts that a rank holds: a place is kept
    for every part that has none, so that the oldest micro-batch always comes through.
    """
    parts = max(len(empty.held_by(rank)) for rank in range(empty.num_ranks))
    if live < parts:
        raise ScheduleError(
            f"{empty.name} needs room for {parts} micro-batches, one for each stage of a rank,"
            f" got {live}"
        )
    arranger = _Arranger(empty, durations, live, rule)
    arranger.run()
    return replace(empty, actions=tuple(tuple(row) for row in arranger.rows))


def quickest(tables: Iterable[Schedule], durations: Mapping[Kind, float]) -> Schedule:
    """The table with the shortest step; of equals the first."""
    ticks = in_ticks(durations)
    return min(tables, key=lambda table: simulate(table, durations=ticks).makespan)


def in_ticks(durations: Mapping[Kind, float]) -> dict[Kind, int]:
    """Whole numbers in the same ratios, so that sums over different ways compare exactly.

    What is less than a millionth of the longest time counts as a millionth of it.
    """
    check_times(durations)
    longest = Fraction(max(durations.values()))
    least = Fraction(1, 10**6)
    shares = {
        kind: max(least, (Fraction(time) / longest).limit_denominator(least.denominator))
        for kind, time in durations.items()
    }
    ticks = math.lcm(*(share.denominator for share in shares.values()))
    return {kind: int(share * ticks) for kind, share in shares.items()}


class _Arranger:
    """The state while time goes by: what has started, and what can start when."""

    def __init__(
        self, empty: Schedule, durations: Mapping[Kind, float], live: int, rule: Rule
    ) -> None:
        self.schedule, self.live, self.rule = empty, live, rule
        self.durations = in_ticks(durations)
        self.rows: list[list[Action]] = [[] for _ in range(empty.num_ranks)]
        self.free_at = [0] * empty.num_ranks
        self.started: Counter[tuple[Kind, int, int]] = Counter()  # of (kind, direction, stage)
        self.parts = [empty.held_by(rank) for rank in range(empty.num_ranks)]
        self.queues = [
            [i for i, where in enumerate(empty.directions) if where == direction]
            for direction in range(len(empty.placements))
        ]
        self.ready_at = {Action("F", 0, i): 0 for i in range(empty.num_microbatches)}

    def run(self) -> None:
        """Start actions until none is left, each rank looked at when something may have changed."""
        moments = [(0, rank) for rank in range(self.schedule.num_ranks)]
        while moments:
            now, rank = heapq.heappop(moments)
            if self.free_at[rank] > now:
                continue
            found = min(self._able(rank, now), default=None)
            if found is None:
                continue
            _, direction, action = found
            end = now + self.durations[action.kind]
            self.rows[rank].append(action)
            self.free_at[rank] = end
            self.started[action.kind, direction, action.stage] += 1
            heapq.heappush(moments, (end, rank))
            for follower in self._followers(action):
                self.ready_at[follower] = end
                home = self.schedule.placements[direction][follower.stage]
                if home != rank:
                    heapq.heappush(moments, (end, home))

    def _able(self, rank: int, now: int) -> Iterator[tuple[tuple[int, ...], int, Action]]:
        """(key, direction, action) of everything that the rank could start now."""
        for direction, stage in self.parts[rank]:
            queue = self.queues[direction]
            for kind in self.schedule.kinds:
                turn = self.started[kind, direction, stage]
                if turn < len(queue):
                    action = Action(kind, stage, queue[turn])
                    if self.ready_at.get(action, math.inf) <= now and (
                        kind != "F" or self._has_room(rank, direction, stage)
                    ):
                        yield self.rule(kind, stage, turn), direction, action

    def _followers(self, action: Action) -> Iterator[Action]:
        """The actions whose last missing input is the result of `action`."""
        if action.kind == "F" and action.stage == self.schedule.num_stages - 1:
            yield Action("B", action.stage, action.micro_batch)
        taker = consumer(self.schedule, action)
        if taker is not None:
            yield taker

    def _has_room(self, rank: int, direction: int, stage: int) -> bool:
        """Whether one more forward of this part leaves a place for every part without one."""
        taken = 1
        for other in self.parts[rank]:
            kept = self._kept(*other)
            waits = kept == 0 and self.started["F", *other] < len(self.queues[other[0]])
            taken += 1 if waits and other != (direction, stage) else kept
        return taken <= self.live

    def _kept(self, direction: int, stage: int) -> int:
        return self.started["F", direction, stage] - self.started["B", direction, stage]
