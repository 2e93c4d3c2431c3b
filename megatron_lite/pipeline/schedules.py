"""The schedules by name, and evaluation's. The generators are in a file for each family.

They state only the order of work on each rank; messages.py derives what is sent, verify.py has
checked each table that build_schedule returns. A table depends on sizes and relative times alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from megatron_lite.pipeline.actions import Action, Kind, Schedule, ScheduleError
from megatron_lite.pipeline.chimera import chimera
from megatron_lite.pipeline.classic import gpipe, interleaved, one_f_one_b
from megatron_lite.pipeline.simulate import Times
from megatron_lite.pipeline.table_files import is_table_file, read_table
from megatron_lite.pipeline.verify import verify
from megatron_lite.pipeline.zero_bubble import dualpipev, zb_h1, zbv

Durations = Mapping[Kind, float]


@dataclass(frozen=True)
class Family:
    """A named schedule: how its table is made, and what sizes it is for.

    `make` takes ranks, micro-batches, stages a rank and the times of the table's actions.
    `chunks` is the number of stages a rank, None where the user chooses it; `group` the number of
    micro-batches, for a number of ranks, of which there must be a multiple.
    """

    make: Callable[[int, int, int, Durations], Schedule]
    chunks: int | None = 1
    split_backward: bool = False
    even_ranks: bool = False
    group: Callable[[int], int] = lambda num_ranks: 1


SCHEDULES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": Family(lambda p, m, v, times: gpipe(p, m)),
        "1f1b": Family(lambda p, m, v, times: one_f_one_b(p, m)),
        "interleaved": Family(
            lambda p, m, v, times: interleaved(p, m, chunks=v),
            chunks=None,
            group=lambda num_ranks: num_ranks,
        ),
        "chimera": Family(
            lambda p, m, v, times: chimera(p, m, durations=times),
            even_ranks=True,
            group=lambda num_ranks: 2,
        ),
        "zb-h1": Family(lambda p, m, v, times: zb_h1(p, m), split_backward=True),
        "zbv": Family(lambda p, m, v, times: zbv(p, m), chunks=2, split_backward=True),
        "dualpipev": Family(lambda p, m, v, times: dualpipev(p, m), chunks=2, split_backward=True),
    }
)


def forward_only(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Forwards without backwards (evaluation), stage s on rank placement[s].

    As many micro-batches as there are ranks pass through a rank's first stage, then through its
    second one, and so on: any placement is without deadlock, since all ranks work in one order of
    (group of micro-batches, stage, micro-batch).
    """
    if not placement or num_microbatches < 1:
        raise ScheduleError(
            "a schedule needs at least one stage and one micro-batch,"
            f" got {len(placement)} stages and {num_microbatches} micro-batches"
        )
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


def chunks_a_rank(name: str, virtual: int | None = None) -> int:
    """Stages that a rank holds in each direction under the schedule `name`.

    `virtual` is the user's wish, None for what the schedule asks for. Raises ScheduleError for an
    unknown name, and where the two differ or the user must choose.
    """
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ScheduleError(f"unknown pipeline schedule {name!r}; known are: {known}")
    chunks = SCHEDULES[name].chunks
    if chunks is None:
        if virtual is None:
            raise ScheduleError(
                f"schedule {name!r} needs to be told how many stages a rank holds (--virtual, or "
                "parallel.virtual_pipeline_model_parallel_size of a config)"
            )
        return virtual
    if virtual not in (None, chunks):
        raise ScheduleError(f"schedule {name!r} has {chunks} stages a rank, not {virtual}")
    return chunks


def build_schedule(
    name: str,
    *,
    num_microbatches: int,
    num_stages: int | None = None,
    num_ranks: int | None = None,
    virtual: int | None = None,
    times: Times | None = None,
) -> Schedule:
    """The training schedule, verified, that `parallel.pipeline_schedule` calls: a name or a file.

    Give `num_stages` (parts of the model), `num_ranks` or both; `virtual` is the number of stages a
    rank, by default what the schedule asks for. `times` are those that chimera arranges its actions
    by, by default a backward of two forwards. Raises ScheduleError for an unknown
    name and for sizes that the schedule is not for.
    """
    if is_table_file(name):
        table = read_table(name)
        _check_table(
            table,
            num_stages=num_stages,
            num_ranks=num_ranks,
            virtual=virtual,
            num_microbatches=num_microbatches,
        )
        return table
    ranks, chunks = _sizes(name, num_stages, num_ranks, virtual)
    if min(ranks, chunks, num_microbatches) < 1:
        raise ScheduleError(
            "a schedule needs at least one stage and one micro-batch,"
            f" got {ranks * chunks} stages and {num_microbatches} micro-batches"
        )
    return _made(name, ranks, num_microbatches, chunks, times or Times())


@lru_cache(maxsize=2)
def _made(name: str, ranks: int, num_microbatches: int, chunks: int, times: Times) -> Schedule:
    """A verified table, remembered: a run's advice, its grid and its trainer ask for one each."""
    family = SCHEDULES[name]
    durations = times.durations(split_backward=family.split_backward)
    table = family.make(ranks, num_microbatches, chunks, durations)
    verify(table)
    return table


def _sizes(
    name: str, num_stages: int | None, num_ranks: int | None, virtual: int | None
) -> tuple[int, int]:
    """Ranks and stages a rank, from what is given."""
    if num_stages is not None and num_ranks and virtual is None:
        virtual = num_stages // num_ranks
    chunks = chunks_a_rank(name, virtual)
    ranks = num_ranks if num_ranks is not None else (num_stages or 0) // chunks
    if num_stages not in (None, ranks * chunks):
        raise ScheduleError(
            f"schedule {name!r} has {chunks} stages a rank, got {num_stages} stages"
            + ("" if num_ranks is None else f" for {num_ranks} ranks")
        )
    return ranks, chunks


def _check_table(
    table: Schedule,
    *,
    num_stages: int | None,
    num_ranks: int | None,
    virtual: int | None,
    num_microbatches: int,
) -> None:
    """A table from a file is for one number of ranks and micro-batches."""
    asked = (
        ("ranks", table.num_ranks, num_ranks),
        ("micro-batches", table.num_microbatches, num_microbatches),
        ("stages", table.num_stages, num_stages),
        ("stages", table.num_stages, virtual and table.num_ranks * virtual),
    )
    for what, found, wanted in asked:
        if wanted not in (None, found):
            raise ScheduleError(f"{table.name}: is for {found} {what}, but the run has {wanted}")
