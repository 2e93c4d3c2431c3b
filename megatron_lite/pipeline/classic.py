"""GPipe, 1F1B and its interleaved form: tables in closed form.

Every function returns the table of one step; build_schedule in schedules.py knows them by name.
All but the interleaved one hold for any number of micro-batches, also fewer than stages.
"""

from __future__ import annotations

from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965); stage i is on rank i.

    Keeps the activations of every micro-batch. Backwards run in the order of the micro-batches,
    as in 1F1B, so both schedules add gradients up in the same order and get the same bits.
    """
    rows = []
    for rank in range(num_ranks):
        forwards = [Action("F", rank, i) for i in range(num_microbatches)]
        backwards = [Action("B", rank, i) for i in range(num_microbatches)]
        rows.append(forwards + backwards)
    return Schedule.one_way(
        "gpipe", placement=range(num_ranks), num_microbatches=num_microbatches, actions=rows
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn (PipeDream-Flush, arXiv:2104.04473); stage i is on rank i.

    Rank i starts with as many forwards as there are ranks behind it, or all if there are fewer,
    and so keeps at most min(num_ranks - i, num_microbatches) micro-batches alive.
    """
    rows = []
    for rank in range(num_ranks):
        forwards = [Action("F", rank, i) for i in range(num_microbatches)]
        backwards = [Action("B", rank, i) for i in range(num_microbatches)]
        rows.append(_in_turn(forwards, backwards, ahead=num_ranks - 1 - rank))
    return Schedule.one_way(
        "1f1b", placement=range(num_ranks), num_microbatches=num_microbatches, actions=rows
    )


def interleaved(num_ranks: int, num_microbatches: int, *, chunks: int) -> Schedule:
    """1F1B with several stages a rank in Megatron's order (arXiv:2104.04473, section 2.2).

    Stage s is on rank s mod P. As many micro-batches as there are ranks pass through a rank's
    first stage, then through its second, and so on; the bubble is 1F1B's divided by `chunks`.
    Raises ScheduleError for fewer than 2 chunks and for micro-batches that P does not divide.
    """
    if chunks < 2:
        raise ScheduleError(f"interleaved needs at least 2 stages a rank, got {chunks}")
    if num_microbatches % num_ranks:
        raise ScheduleError(
            f"interleaved needs a number of micro-batches that {num_ranks} ranks divide,"
            f" got {num_microbatches}"
        )
    order = [
        (chunk, first + i)
        for first in range(0, num_microbatches, num_ranks)
        for chunk in range(chunks)
        for i in range(num_ranks)
    ]
    rows = []
    for rank in range(num_ranks):
        forwards = [Action("F", chunk * num_ranks + rank, i) for chunk, i in order]
        backwards = [Action("B", (chunks - 1 - chunk) * num_ranks + rank, i) for chunk, i in order]
        ahead = 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks
        rows.append(_in_turn(forwards, backwards, ahead=ahead))
    placement = [stage % num_ranks for stage in range(num_ranks * chunks)]
    return Schedule.one_way(
        "interleaved", placement=placement, num_microbatches=num_microbatches, actions=rows
    )


def _in_turn(forwards: list[Action], backwards: list[Action], *, ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    row = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards) - ahead :]
