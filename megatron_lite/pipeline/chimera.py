"""Chimera: two pipelines against each other (arXiv:2107.06925), every other micro-batch each way.

Stage s is on rank s downwards and on rank P - 1 - s upwards, so every rank holds two stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lite.pipeline.actions import Kind, Schedule, ScheduleError
from megatron_lite.pipeline.greedy import (
    arrange,
    backwards_first,
    empty_table,
    forwards_first,
    quickest,
)


def chimera(
    num_ranks: int,
    num_microbatches: int,
    *,
    durations: Mapping[Kind, float],
    live: int | None = None,
) -> Schedule:
    """The quickest of a few greedy tables with at most `live` micro-batches alive (default P).

    The paper joins units of P micro-batches, which leaves gaps where a backward takes longer than
    a forward. Here forwards and backwards are placed by simulated time instead, with forwards
    first and with backwards first, for the given times and for a backward of two forwards; which
    rule wins depends on sizes and times. With as many micro-batches as ranks or more, all
    attain the paper's (P - 2) / (2 m + P - 2) at equal times.
    """
    if num_ranks % 2:
        raise ScheduleError(f"chimera needs an even number of ranks, got {num_ranks}")
    if num_microbatches % 2:
        raise ScheduleError(
            f"chimera needs an even number of micro-batches, half of them each way,"
            f" got {num_microbatches}"
        )
    down = range(num_ranks)
    directions = [i % 2 for i in range(num_microbatches)]
    empty = empty_table("chimera", (down, down[::-1]), directions)
    usual: Mapping[Kind, float] = {"F": durations["F"], "B": 2 * durations["F"]}
    room = num_ranks if live is None else live
    assumed = (durations,) if durations == usual else (durations, usual)
    return quickest(
        (
            arrange(empty, durations=times, live=room, rule=rule)
            for times in assumed
            for rule in (forwards_first, backwards_first)
        ),
        durations,
    )
