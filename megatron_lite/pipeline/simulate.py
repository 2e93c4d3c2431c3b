"""Times a schedule: when each action starts and ends, how long the step takes, how much is idle.

A model of the schedule alone: it measures nothing, and sends overlap with compute. Used by tests,
the planner and the timeline tool. Raises ScheduleError where the table deadlocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.messages import supplier
from megatron_lite.pipeline.verify import execution_order


@dataclass(frozen=True, slots=True)
class Times:
    """How long a micro-batch takes on a rank's share of the model, in any unit.

    `backward` is the whole backward, `weight` the part of it that a split backward can leave for
    later.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0

    def durations(self, *, split_backward: bool, chunks: float = 1) -> dict[Kind, float]:
        """The time of each kind of action where the share is `chunks` equal stages."""
        if not split_backward:
            return {"F": self.forward / chunks, "B": self.backward / chunks}
        if not self.weight < self.backward:
            raise ValueError(
                f"the weight part of the backward must be below the whole of {self.backward},"
                f" got {self.weight}"
            )
        return {
            "F": self.forward / chunks,
            "B": (self.backward - self.weight) / chunks,
            "W": self.weight / chunks,
        }


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end, in the time unit of the given durations."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`rows[rank]` are the rank's timed actions in order; `makespan` is the end of the last one.

    `bubble_fraction` is idle time / (ranks x makespan), from 0 (none) towards 1.
    """

    rows: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    bubble_fraction: float


def simulate(
    schedule: Schedule, *, durations: Mapping[Kind, float], p2p_time: float = 0.0
) -> Timeline:
    """Runs `schedule` with every rank starting at 0 and each action as early as possible.

    `durations` gives the time of one action of each kind, `p2p_time` the time from the end of an
    action to the arrival of its message on another rank; a rank computes on while it sends.
    """
    check_times(durations, p2p_time)
    rows: list[list[TimedAction]] = [[] for _ in range(schedule.num_ranks)]
    ends: dict[Action, float] = {}
    for rank, action in execution_order(schedule):
        start = rows[rank][-1].end if rows[rank] else 0.0
        giver = supplier(schedule, action)
        if giver is not None and schedule.rank_of(giver.stage, giver.micro_batch) != rank:
            start = max(start, ends[giver] + p2p_time)
        end = ends[action] = start + durations[action.kind]
        rows[rank].append(TimedAction(action, start, end))
    makespan = max(timed.end for row in rows for timed in row)
    busy = sum(durations[action.kind] for row in schedule.actions for action in row)
    return Timeline(
        rows=tuple(tuple(row) for row in rows),
        makespan=makespan,
        bubble_fraction=1.0 - busy / (schedule.num_ranks * makespan),
    )


def simulate_shares(schedule: Schedule, times: Times, *, p2p_time: float = 0.0) -> Timeline:
    """Runs `schedule` on ranks whose share of the model takes `times`, in equal stages."""
    chunks = schedule.num_stages / schedule.num_ranks
    durations = times.durations(split_backward=schedule.split_backward, chunks=chunks)
    return simulate(schedule, durations=durations, p2p_time=p2p_time)


def check_times(durations: Mapping[Kind, float], p2p_time: float = 0.0) -> None:
    """ValueError where an action would take no time, or a message less than none."""
    for kind, duration in durations.items():
        if not duration > 0:
            raise ValueError(f"the duration of {kind} must be above 0, got {duration}")
    if not p2p_time >= 0:
        raise ValueError(f"p2p_time must be at least 0, got {p2p_time}")
