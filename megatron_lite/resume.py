"""Where a run starts: from initial weights, or from a checkpoint that fits its config.

Called by build.py on every rank. The reading is checkpoint/'s, the states are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.checkpoint.load import (
    WEIGHTS,
    check_files,
    check_tensors,
    load_fragments,
    load_rng,
    rng_file,
    shapes_of,
)
from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.config.resuming import data_differ
from megatron_lite.config.schema import CheckpointConfig, RunConfig
from megatron_lite.engine.interface import Engine
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.random import RngStreams
from megatron_lite.mpu.reductions import gather_texts, together
from megatron_lite.progress import Progress


@dataclass
class Start:
    """Where a run stands before its first step."""

    progress: Progress
    lines: list[str]
    """What to tell about it."""
    bytes: int = 0
    """Read from a checkpoint by all ranks together; 0: there was none."""


@dataclass(frozen=True)
class _Found:
    """A whole checkpoint, and what was wrong with newer ones."""

    folder: Path
    manifest: Manifest
    passed_over: list[str] = field(default_factory=list)


def restore(
    config: RunConfig,
    resolved: Mapping[str, Any],
    *,
    root: Path | None,
    grid: Grid,
    engine: Engine,
    streams: RngStreams,
) -> Start:
    """Load the configured checkpoint from `root`; `resolved` is the config as plain values.

    CheckpointError on every rank where any rank can't load.
    """
    if root is None:
        return Start(Progress(), [" starting from initial weights |"])
    with together(CheckpointError):
        if grid.rank == 0:
            store.recover(root)
    found = _find(config.checkpoint, root, grid)
    if found is None:
        return Start(Progress(), [f" no checkpoint in {root}: starting from initial weights |"])
    states = WEIGHTS if _weights_alone(config.checkpoint, found) else STATES
    fragments = list(engine.fragments())
    lines = [
        *found.passed_over,
        *_check_tensors(config.checkpoint, found.manifest, fragments, grid),
    ]
    with together(CheckpointError):
        count = load_fragments(
            found.folder,
            found.manifest,
            fragments,
            states=states,
            lenient=not config.checkpoint.strict,
        )
    engine.refresh()
    start = _finetune(found) if config.checkpoint.finetune else _go_on(config, resolved, found)
    if states == STATES:
        engine.load_scalars(found.manifest.scalars)
    else:
        start.lines.append(
            " only weights were loaded: optimizer states and loss scale start anew |"
        )
    if not config.checkpoint.finetune:
        start.lines.append(_restore_streams(config, found, start.progress, grid, streams))
    start.lines = [*lines, *start.lines]
    counts: list[Any] = [None] * grid.world_size
    dist.all_gather_object(counts, count)
    start.bytes = sum(counts)
    return start


def _find(config: CheckpointConfig, root: Path, grid: Grid) -> _Found | None:
    """The checkpoint to load; None where there is none and the config allows that."""
    with together(CheckpointError):
        newest = store.find(root, step=config.ckpt_step)
        if newest is None and config.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"{root}: no checkpoint is there; correct checkpoint.load, or set "
                "checkpoint.exit_on_missing_checkpoint to false to start from initial weights"
            )
    if newest is None:
        return None
    passed_over: list[str] = []
    older = store.older(newest)
    for folder in [newest, *older]:
        try:
            with together(CheckpointError):
                manifest = Manifest.read(folder)
            if config.verify_on_load:
                _verify(folder, manifest, grid)
            return _Found(folder, manifest, passed_over)
        except CheckpointError as error:
            if not config.fall_back_to_older:
                hint = "; checkpoint.fall_back_to_older would take the newest whole one"
                raise CheckpointError(f"{error}{hint if older else ''}") from error
            passed_over.append(f" passed over {folder}: {error} |")
    raise CheckpointError(f"{root}: no checkpoint is whole:\n" + "\n".join(passed_over))


def _verify(folder: Path, manifest: Manifest, grid: Grid) -> None:
    """Read all files, each by one rank, and compare their checksums."""
    names = sorted(manifest.files)[grid.rank :: grid.world_size]
    faults = check_files(folder, {name: manifest.files[name] for name in names})
    said = gather_texts("\n  ".join(faults))
    if said:
        raise CheckpointError(f"{folder} is damaged:\n  " + "\n  ".join(said.values()))


def _weights_alone(config: CheckpointConfig, found: _Found) -> bool:
    alone = config.finetune or config.no_load_optim
    if not alone and not set(STATES) <= set(found.manifest.states):
        raise CheckpointError(
            f"{found.folder} holds weights alone: set checkpoint.finetune to start a new run from "
            "them, or checkpoint.no_load_optim to go on without the optimizer's states"
        )
    return alone


def _check_tensors(
    config: CheckpointConfig, manifest: Manifest, fragments: list[Fragment], grid: Grid
) -> list[str]:
    everyones: list[Any] = [None] * grid.world_size
    dist.all_gather_object(everyones, shapes_of(fragments))
    model = {name: shape for held in everyones for name, shape in held.items()}
    lines = check_tensors(manifest, model, lenient=not config.strict)
    return [f" {line} |" for line in lines]


def _finetune(found: _Found) -> Start:
    line = f" weights of {found.folder} | iteration, samples and schedule start at 0 |"
    return Start(Progress(), [line])


def _go_on(config: RunConfig, resolved: Mapping[str, Any], found: _Found) -> Start:
    """The checkpoint's position, in other data from their beginning if that is asked for."""
    progress = Progress(**found.manifest.progress)
    start = Start(progress, [f" loaded {found.folder} | iteration {progress.iteration} |"])
    with together(CheckpointError):
        saved = store.read_json(found.folder, "config.json")
    if config.checkpoint.changed_data == "restart" and data_differ(saved, resolved):
        progress.data_start = progress.consumed_samples
        start.lines.append(" other data: read from their beginning |")
    return start


def _restore_streams(
    config: RunConfig, found: _Found, progress: Progress, grid: Grid, streams: RngStreams
) -> str:
    """Continue this rank's random streams where they are to be had; returns a line on it."""
    manifest = found.manifest
    there = manifest.layout == grid.sizes and rng_file(grid.rank) in manifest.files
    if there and not config.checkpoint.no_load_rng:
        with together(CheckpointError):
            streams.restore(load_rng(found.folder, grid.rank))
        return " random streams continued |"
    streams.seed(config.training.seed + progress.iteration, grid)
    why = "as asked for" if there else f"since it was saved from {manifest.saved_from}"
    return f" random streams seeded anew, {why} |"
