"""Generators of schedules: each function returns the complete table of one training step.

They state only the order of work on each rank; messages.py derives what is sent, verify.py checks
the table. Every generator holds for any number of micro-batches, also fewer than stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron_lite.pipeline.actions import Action, Schedule, ScheduleError


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965); stage i is on rank i.

    Keeps the activations of every micro-batch. Backwards run in the order of the micro-batches,
    as in 1F1B, so both schedules add gradients up in the same order and get the same bits.
    """
    _check_sizes(num_stages, num_microbatches)
    rows = []
    for stage in range(num_stages):
        forwards = [Action("F", stage, i) for i in range(num_microbatches)]
        backwards = [Action("B", stage, i) for i in range(num_microbatches)]
        rows.append((*forwards, *backwards))
    return _one_stage_a_rank("gpipe", rows, num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn (PipeDream-Flush, arXiv:2104.04473); stage i is on rank i.

    Stage i starts with as many forwards as there are stages behind it, or all if there are fewer,
    and so keeps at most min(num_stages - i, num_microbatches) micro-batches alive.
    """
    _check_sizes(num_stages, num_microbatches)
    rows = []
    for stage in range(num_stages):
        warm_up = min(num_stages - 1 - stage, num_microbatches)
        row = [Action("F", stage, i) for i in range(warm_up)]
        for i in range(num_microbatches - warm_up):
            row += [Action("F", stage, warm_up + i), Action("B", stage, i)]
        row += [Action("B", stage, i) for i in range(num_microbatches - warm_up, num_microbatches)]
        rows.append(tuple(row))
    return _one_stage_a_rank("1f1b", rows, num_microbatches)


def forward_only(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Forwards without backwards (evaluation), stage s on rank placement[s].

    As many micro-batches as there are ranks pass through a rank's first stage, then through its
    second one, and so on: any placement is without deadlock, since all ranks work in one order of
    (group of micro-batches, stage, micro-batch).
    """
    _check_sizes(len(placement), num_microbatches)
    ranks = max(placement) + 1
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for first in range(0, num_microbatches, ranks):
        for stage, rank in enumerate(placement):
            last = min(first + ranks, num_microbatches)
            rows[rank] += [Action("F", stage, i) for i in range(first, last)]
    return Schedule.one_way(
        "forward-only",
        placement=placement,
        num_microbatches=num_microbatches,
        actions=rows,
        forward_only=True,
    )


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b}
)


def build_schedule(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_ranks: int | None = None,
    virtual: int | None = None,
) -> Schedule:
    """The training schedule that `parallel.pipeline_schedule` calls `name`.

    `num_stages` are the parts of the model, `virtual` as many of them as a rank holds (by default
    what the schedule asks for), `num_ranks` the quotient. Raises ScheduleError for an unknown name
    and for sizes that the schedule is not for.
    """
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ScheduleError(f"unknown pipeline schedule {name!r}; known are: {known}")
    if num_ranks not in (None, num_stages) or virtual not in (None, 1):
        raise ScheduleError(f"schedule {name!r} has one stage a rank, got {num_stages} stages")
    return SCHEDULES[name](num_stages, num_microbatches)


def _one_stage_a_rank(
    name: str,
    rows: list[tuple[Action, ...]],
    num_microbatches: int,
) -> Schedule:
    """The schedule whose rank i holds stage i alone and runs rows[i]."""
    return Schedule.one_way(
        name,
        placement=range(len(rows)),
        num_microbatches=num_microbatches,
        actions=rows,
    )


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            "a schedule needs at least one stage and one micro-batch,"
            f" got {num_stages} stages and {num_microbatches} micro-batches"
        )
