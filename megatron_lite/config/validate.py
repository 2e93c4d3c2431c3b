"""Runs every rule that joins fields over a draft and gathers all faults; called by `load`.

The rules themselves are in `rules/`, bounds of single fields in `sections/`.
"""

from __future__ import annotations

from typing import cast

from megatron_lite.config.draft import Absent, Draft
from megatron_lite.config.errors import Problem
from megatron_lite.config.rules import (
    advice,
    checkpoint,
    engine,
    files,
    logging,
    model,
    parallel,
    pipeline,
    training,
)
from megatron_lite.config.schema import RunConfig

RULES = (
    *model.RULES,
    *parallel.RULES,
    *pipeline.RULES,
    *training.RULES,
    *engine.RULES,
    *files.RULES,
    *checkpoint.RULES,
    *logging.RULES,
)
WORLD_RULES = (
    *parallel.WORLD_RULES,
    *pipeline.WORLD_RULES,
    *training.WORLD_RULES,
    *engine.WORLD_RULES,
    *logging.WORLD_RULES,
)


def check(draft: Draft | RunConfig, world_size: int | None) -> list[Problem]:
    """Every broken rule; rules whose fields did not parse are passed over.

    Args:
        world_size: ranks of the run; None skips the rules that need it.
    """
    cfg = cast(RunConfig, draft)
    problems: list[Problem] = []
    for rule in RULES:
        try:
            problems.extend(rule(cfg))
        except Absent:
            continue
    if world_size is None:
        return problems
    for world_rule in WORLD_RULES:
        try:
            problems.extend(world_rule(cfg, world_size))
        except Absent:
            continue
    return problems


def advise(config: RunConfig, world_size: int) -> list[str]:
    """Warnings about a valid configuration, one line each."""
    return [line for advise_on in advice.ADVICE for line in advise_on(config, world_size)]


def missing_files(config: Draft | RunConfig) -> list[Problem]:
    """Files and packages that this machine lacks: faults only where the run starts."""
    cfg = cast(RunConfig, config)
    return [*files.missing_files(cfg), *logging.missing_packages(cfg)]


def default_world_size(draft: Draft | RunConfig) -> int | None:
    """Ranks that the configuration asks for; None where that did not parse."""
    launch = cast(RunConfig, draft).launch
    try:
        return launch.nodes * launch.gpus_per_node
    except Absent:
        return None
