"""What must be over before an action can end, on every rank: vector clocks of a schedule.

Pure bookkeeping over a table that can run. The executor derives from it which receives may be
posted early, and which of its sends have arrived without asking.
"""

from __future__ import annotations

from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.messages import needs, supplier
from megatron_lite.pipeline.verify import execution_order

Clock = tuple[int, ...]
"""For each rank how many of its actions, from the first one on."""


def clocks(schedule: Schedule) -> dict[Action, Clock]:
    """The clock of each action, itself included. ScheduleError where the table deadlocks."""
    found: dict[Action, Clock] = {}
    now = [[0] * schedule.num_ranks for _ in range(schedule.num_ranks)]
    for rank, action in execution_order(schedule):
        giver = supplier(schedule, action)
        if giver is not None and needs(schedule, action) is not None:
            now[rank] = [max(pair) for pair in zip(now[rank], found[giver], strict=True)]
        now[rank][rank] += 1
        found[action] = tuple(now[rank])
    return found
