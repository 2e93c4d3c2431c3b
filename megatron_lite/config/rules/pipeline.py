"""What a pipeline schedule asks of ranks, stages, layers and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config import batch
from megatron_lite.config.draft import Absent
from megatron_lite.config.errors import NO_VALUE, Problem
from megatron_lite.config.rules.common import (
    Rule,
    WorldRule,
    data_parallel_size,
    nearest_multiples,
)
from megatron_lite.config.schema import RunConfig
from megatron_lite.pipeline.actions import Schedule, ScheduleError
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule
from megatron_lite.pipeline.table_files import is_table_file, read_table

SCHEDULE = "parallel.pipeline_schedule"
RANKS = "parallel.pipeline_model_parallel_size"
VIRTUAL = "parallel.virtual_pipeline_model_parallel_size"
LAYOUT = "parallel.pipeline_model_parallel_layout"


def _table(cfg: RunConfig) -> Schedule | None:
    """The table of a schedule that is a file; Absent where it is faulty."""
    name = cfg.parallel.pipeline_schedule
    if not is_table_file(name):
        return None
    try:
        return read_table(name)
    except ScheduleError:
        raise Absent(SCHEDULE) from None


def table_of(cfg: RunConfig, num_microbatches: int) -> Schedule:
    """The run's table of so many micro-batches; that of a file is as it is."""
    return _table(cfg) or _built(cfg, num_microbatches)


def _built(cfg: RunConfig, num_microbatches: int) -> Schedule:
    parallel = cfg.parallel
    return build_schedule(
        parallel.pipeline_schedule,
        num_ranks=parallel.pipeline_model_parallel_size,
        num_microbatches=num_microbatches,
        virtual=parallel.virtual_pipeline_model_parallel_size,
    )


def num_stages(cfg: RunConfig) -> int:
    """Parts that the model is cut into; Absent where another rule refuses the schedule."""
    parallel = cfg.parallel
    if table := _table(cfg):
        return table.num_stages
    chunks = SCHEDULES[parallel.pipeline_schedule].chunks
    chunks = chunks or parallel.virtual_pipeline_model_parallel_size
    if chunks is None:
        raise Absent(VIRTUAL)
    return parallel.pipeline_model_parallel_size * chunks


def ends_and_directions(cfg: RunConfig) -> tuple[int, int, int]:
    """The ranks of the first and of the last stage, and how many directions there are."""
    name, pp = cfg.parallel.pipeline_schedule, cfg.parallel.pipeline_model_parallel_size
    table = _table(cfg) or _built(cfg, SCHEDULES[name].group(pp))
    return table.placements[0][0], table.placements[0][-1], len(table.placements)


def table_can_run(cfg: RunConfig) -> Iterator[Problem]:
    """A table from a file is legal, and for as many ranks as the pipeline has."""
    name, pp = cfg.parallel.pipeline_schedule, cfg.parallel.pipeline_model_parallel_size
    if not is_table_file(name):
        return
    try:
        table = read_table(name)
    except ScheduleError as error:
        reason = str(error).removeprefix(f"{name}: ").removeprefix(f"schedule {name!r}: ")
        yield Problem(SCHEDULE, name, f"is no table that can run: {reason}")
        return
    if table.num_ranks != pp:
        rule = f"is a table for {table.num_ranks} ranks, but {RANKS} is {pp}"
        yield Problem(SCHEDULE, name, rule, f"use {RANKS} {table.num_ranks}, or another table")
    for rank in sorted(set(range(table.num_ranks)) - set(table.placements[0])):
        rule = f"gives rank {rank} no stage, so it would have nothing to evaluate or to train"
        yield Problem(SCHEDULE, name, rule, "place a stage of the first direction on every rank")


def schedule_suits_ranks(cfg: RunConfig) -> Iterator[Problem]:
    """Pipelines against each other meet on an even number of ranks."""
    name, pp = cfg.parallel.pipeline_schedule, cfg.parallel.pipeline_model_parallel_size
    if not is_table_file(name) and SCHEDULES[name].even_ranks and pp % 2:
        rule = f"needs an even {RANKS}, which is {pp}"
        yield Problem(SCHEDULE, name, rule, f"use {nearest_multiples(pp, 2)} ranks, or 1f1b")


def virtual_stages_suit(cfg: RunConfig) -> Iterator[Problem]:
    """The number of stages a rank is the user's under some schedules, given under others."""
    name, virtual = (
        cfg.parallel.pipeline_schedule,
        cfg.parallel.virtual_pipeline_model_parallel_size,
    )
    if is_table_file(name):
        if virtual is not None:
            yield Problem(VIRTUAL, virtual, "has no effect with a table", "leave it out")
        return
    chunks = SCHEDULES[name].chunks
    if chunks is None and virtual is None:
        yield Problem(VIRTUAL, NO_VALUE, f'is required with "{name}"', "use 2 or more")
    elif chunks is None and virtual == 1:
        yield Problem(VIRTUAL, virtual, f'must be above 1 with "{name}"', "use 2 or more, or 1f1b")
    elif chunks is not None and virtual not in (None, chunks):
        yield Problem(VIRTUAL, virtual, f'must be {chunks} with "{name}"', "leave it out")


def split_backwards_are_not_compiled(cfg: RunConfig) -> Iterator[Problem]:
    """A compiled layer's backward is one piece: no weight gradient of it can wait."""
    name, table = cfg.parallel.pipeline_schedule, _table(cfg)
    split = SCHEDULES[name].split_backward if table is None else table.split_backward
    if split and cfg.training.compile:
        rule = f"cannot run with {SCHEDULE} {name}, which splits the backward of every layer"
        yield Problem("training.compile", True, rule, "use false, or a schedule without W")


def two_ways_are_mirrored(cfg: RunConfig) -> Iterator[Problem]:
    """Where a table has two directions, the ranks that hold the same stages come in pairs."""
    table = _table(cfg)
    if table is None or len(table.placements) == 1:
        return
    if len(table.placements) > 2:
        rule = f"has {len(table.placements)} directions, and a run has two at most"
        yield Problem(SCHEDULE, cfg.parallel.pipeline_schedule, rule, "use one placement or two")
        return
    held = [{stage for _, stage in table.held_by(rank)} for rank in range(table.num_ranks)]
    for rank, stages in enumerate(held[: len(held) // 2 + 1]):
        other = len(held) - 1 - rank
        if rank == other or held[other] != stages:
            rule = (
                f"has two directions, so rank {rank} and its mirror image, rank {other}, must be "
                "two ranks that hold the same stages"
            )
            name = cfg.parallel.pipeline_schedule
            yield Problem(SCHEDULE, name, rule, "place the second direction the other way round")
            return


def stages_have_layers(cfg: RunConfig) -> Iterator[Problem]:
    """Every stage holds at least one layer."""
    pp, layers = cfg.parallel.pipeline_model_parallel_size, cfg.model.num_layers
    stages = num_stages(cfg)
    if stages == pp and pp > layers:
        rule = f"must be at most model.num_layers {layers}: every stage holds a layer"
        yield Problem(RANKS, pp, rule, f"use {layers} or less")
    elif stages > layers:
        rule = f"makes {stages} stages on {pp} ranks, more than model.num_layers {layers}"
        nearest = "use fewer ranks or stages a rank: every stage holds a layer"
        yield Problem(SCHEDULE, cfg.parallel.pipeline_schedule, rule, nearest)


def layout_covers_layers(cfg: RunConfig) -> Iterator[Problem]:
    """A given layout names every stage and every layer once."""
    layout = cfg.parallel.pipeline_model_parallel_layout
    if layout is None:
        return
    layers = cfg.model.num_layers
    if sum(layout) != layers:
        rule = f"must sum to model.num_layers {layers}"
        yield Problem(LAYOUT, layout, rule, f"it sums to {sum(layout)}")
    pp, stages = cfg.parallel.pipeline_model_parallel_size, num_stages(cfg)
    if len(layout) != stages:
        why = f"pipeline_model_parallel_size {pp}"
        if stages != pp:
            why += f", {stages} stages in all"
        rule = f"must have an entry for each stage ({why})"
        yield Problem(LAYOUT, layout, rule, f"it has {len(layout)} entries")


def micro_batches_suit(cfg: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every batch, those of the ramp-up too, is as many micro-batches as the schedule can run."""
    training, name = cfg.training, cfg.parallel.pipeline_schedule
    one = training.micro_batch_size * data_parallel_size(cfg, world_size)
    table = _table(cfg)
    if table is not None:
        size, exact = one * table.num_microbatches, True
        wanted = f"{name} is a table for {table.num_microbatches}"
    else:
        group = SCHEDULES[name].group(cfg.parallel.pipeline_model_parallel_size)
        size, exact = one * group, False
        wanted = f"{name} needs a multiple of {group}"
    sizes = {"training.global_batch_size": [training.global_batch_size]}
    if training.rampup_batch_size is not None and not batch.rampup_fault(training):
        sizes["training.rampup_batch_size"] = batch.rampup_batch_sizes(training)
    for path, batches in sizes.items():
        whole = [b for b in batches if b % one == 0]  # the others have a rule of their own
        wrong = [b for b in whole if (b != size if exact else b % size)]
        if wrong:
            nearest = f"{size}" if exact else nearest_multiples(wrong[0], size)
            rule = f"makes {wrong[0] // one} micro-batches a step, but {wanted}"
            value = training.rampup_batch_size if "rampup" in path else wrong[0]
            yield Problem(path, value, rule, f"use batches of {nearest}")


RULES: tuple[Rule, ...] = (
    table_can_run,
    schedule_suits_ranks,
    virtual_stages_suit,
    split_backwards_are_not_compiled,
    two_ways_are_mirrored,
    stages_have_layers,
    layout_covers_layers,
)
WORLD_RULES: tuple[WorldRule, ...] = (micro_batches_suit,)
