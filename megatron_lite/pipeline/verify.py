"""Checks that a schedule is complete and can be run, and counts the activations it keeps.

Runs no model: ranks are simulated with asynchronous sends and with receives in the sender's
order. Called before a schedule is run, by simulate.py, tools and tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_lite.pipeline.actions import Action, Kind, Schedule, ScheduleError
from megatron_lite.pipeline.messages import needs, supplier


@dataclass(frozen=True, slots=True)
class Report:
    """What verify found out about a legal schedule.

    `peak_activations[rank]` is the largest number of (stage, micro-batch) pairs whose forward has
    run and whose backward (B) has not. `peak_until_weights[rank]` counts them until their last
    action instead: with a split backward, inputs of the layers and gradients of their outputs stay
    until W. Both are 0 in a forward-only schedule, which keeps nothing for later.
    """

    peak_activations: tuple[int, ...]
    peak_until_weights: tuple[int, ...]


def verify(schedule: Schedule) -> Report:
    """Checks shape, completeness, local order and freedom from deadlock, in this sequence.

    Raises ScheduleError with the first fault found.
    """
    _check_shape(schedule)
    _check_complete(schedule)
    _check_local_order(schedule)
    for _ in execution_order(schedule):
        pass
    ranks = range(schedule.num_ranks)
    return Report(
        peak_activations=tuple(_peak_kept(schedule, rank, until="B") for rank in ranks),
        peak_until_weights=tuple(
            _peak_kept(schedule, rank, until=schedule.kinds[-1]) for rank in ranks
        ),
    )


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yields (rank, action) in an order in which the ranks can run the whole table.

    A rank runs its list from left to right. An action waits for its message; sends never wait,
    and since receives are posted in the sender's order, a message that was sent is there.
    Raises ScheduleError when the ranks that are not done all wait: a deadlock.
    """
    position = [0] * schedule.num_ranks
    done: set[Action] = set()
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                giver = supplier(schedule, action)
                if giver is not None and giver not in done and needs(schedule, action) is not None:
                    break
                yield rank, action
                done.add(action)
                position[rank] += 1
                progress = True
    _check_all_done(schedule, position)


def _check_all_done(schedule: Schedule, position: list[int]) -> None:
    waits = []
    for rank, row in enumerate(schedule.actions):
        if position[rank] < len(row):
            action = row[position[rank]]
            waits.append(f"rank {rank} at {action} waits for {needs(schedule, action)}")
    if waits:
        raise ScheduleError(f"schedule {schedule.name!r}: deadlock: " + "; ".join(waits))


def _check_shape(schedule: Schedule) -> None:
    sizes = (schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
    if min(sizes) < 1:
        raise ScheduleError(
            f"schedule {schedule.name!r}: stages, ranks and micro-batches must be at least 1,"
            f" got {sizes[0]}, {sizes[1]} and {sizes[2]}"
        )
    if len(schedule.actions) != schedule.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r}: {len(schedule.actions)} lists of actions"
            f" for {schedule.num_ranks} ranks"
        )
    if len(schedule.directions) != schedule.num_microbatches:
        raise ScheduleError(
            f"schedule {schedule.name!r}: {len(schedule.directions)} directions"
            f" for {schedule.num_microbatches} micro-batches"
        )
    for micro_batch, direction in enumerate(schedule.directions):
        if not 0 <= direction < len(schedule.placements):
            raise ScheduleError(
                f"schedule {schedule.name!r}: micro-batch {micro_batch} has direction {direction},"
                f" but there are {len(schedule.placements)} placements"
            )
    for direction, placement in enumerate(schedule.placements):
        _check_placement(schedule, direction, placement)


def _check_placement(schedule: Schedule, direction: int, placement: tuple[int, ...]) -> None:
    where = f"schedule {schedule.name!r}: placement {direction}"
    if len(placement) != schedule.num_stages:
        raise ScheduleError(f"{where} names {len(placement)} stages of {schedule.num_stages}")
    for stage, rank in enumerate(placement):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"{where} puts stage {stage} on rank {rank},"
                f" but ranks go from 0 to {schedule.num_ranks - 1}"
            )


def _check_complete(schedule: Schedule) -> None:
    """Every action of the step exactly once, on the rank of its stage, and no other action.

    Takes time for the actions that are there, not for those that the sizes ask for: a short file
    can name many stages and micro-batches.
    """
    found: set[Action] = set()
    for rank, row in enumerate(schedule.actions):
        for action, count in Counter(row).items():
            if fault := _misplaced(schedule, rank, action, count):
                raise ScheduleError(f"schedule {schedule.name!r}: rank {rank}: {action} {fault}")
            found.add(action)
    if len(found) == len(schedule.kinds) * schedule.num_stages * schedule.num_microbatches:
        return
    action = next(action for action in _expected(schedule) if action not in found)
    rank = schedule.rank_of(action.stage, action.micro_batch)
    raise ScheduleError(f"schedule {schedule.name!r}: rank {rank}: {action} is missing")


def _misplaced(schedule: Schedule, rank: int, action: Action, count: int) -> str | None:
    """What is wrong with an action that stands `count` times in the row of `rank`."""
    if (
        action.kind not in schedule.kinds
        or not 0 <= action.stage < schedule.num_stages
        or not 0 <= action.micro_batch < schedule.num_microbatches
    ):
        return "does not belong to this schedule"
    home = schedule.rank_of(action.stage, action.micro_batch)
    if rank != home:
        return f"is on the wrong rank: its stage is on rank {home}"
    return f"appears {count} times" if count > 1 else None


def _expected(schedule: Schedule) -> Iterator[Action]:
    """Every action of the step, sorted."""
    sizes = (range(schedule.num_stages), range(schedule.num_microbatches))
    return (Action(*what) for what in product(sorted(schedule.kinds), *sizes))


def _check_local_order(schedule: Schedule) -> None:
    """What an action needs from its own rank must stand before it in the rank's list."""
    for rank, row in enumerate(schedule.actions):
        done: set[Action] = set()
        for action in row:
            for earlier in _local_needs(schedule, action):
                if earlier not in done:
                    raise ScheduleError(
                        f"schedule {schedule.name!r}: rank {rank}: {action} stands before"
                        f" {earlier}, whose result it needs"
                    )
            done.add(action)


def _local_needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    before: dict[Kind, Kind] = {"B": "F", "W": "B"}
    if action.kind in before:
        yield Action(before[action.kind], action.stage, action.micro_batch)
    giver = supplier(schedule, action)
    if giver is not None and needs(schedule, action) is None:
        yield giver


def _peak_kept(schedule: Schedule, rank: int, *, until: Kind) -> int:
    """The largest number of forwards whose action of the kind `until` has not run."""
    if schedule.forward_only:
        return 0
    kept = peak = 0
    for action in schedule.actions[rank]:
        kept += (action.kind == "F") - (action.kind == until)
        peak = max(peak, kept)
    return peak
