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
from megatron_lite.checkpoint.scan import uncovered
from megatron_lite.config.schema import CheckpointConfig, RunConfig
from megatron_lite.data.training_order import in_other_data
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
    config: dict[str, Any]
    """Of the run that saved it."""
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

    CheckpointError on every rank where any rank can't load; DataError where other data leave no
    place to go on from.
    """
    if root is None:
        return Start(Progress(), [" starting from initial weights |"])
    found = _find(config.checkpoint, root, grid)
    if found is None:
        return Start(Progress(), [f" no checkpoint in {root}: starting from initial weights |"])
    states = WEIGHTS if _weights_alone(config.checkpoint, found) else STATES
    fragments = list(engine.fragments())
    lines = [
        *found.passed_over,
        *_check_tensors(config.checkpoint, found.manifest, fragments, grid),
    ]
    with together(CheckpointError, OSError):
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
    with together(CheckpointError, OSError):
        folders, lines = store.candidates(
            root, step=config.ckpt_step, fall_back=config.fall_back_to_older
        )
        if not folders and config.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"{root}: no checkpoint is there; correct checkpoint.load, or set "
                "checkpoint.exit_on_missing_checkpoint to false to start from initial weights"
            )
    if not folders:
        return None
    passed_over = [f" passed over: {line} |" for line in lines]
    for folder in folders:
        try:
            with together(CheckpointError):
                manifest = Manifest.read(folder)
                saved, _ = store.read_config(folder)
                if faults := uncovered(manifest):
                    raise CheckpointError(f"{folder} is damaged:\n  " + "\n  ".join(faults))
            if config.verify_on_load:
                _verify(folder, manifest, grid)
            return _Found(folder, manifest, saved, passed_over)
        except CheckpointError as error:
            if not config.fall_back_to_older:
                hint = "; checkpoint.fall_back_to_older would take the newest whole one"
                raise CheckpointError(f"{error}{hint if store.older(folder) else ''}") from error
            passed_over.append(f" passed over {folder}: {error} |")
    raise CheckpointError(f"{root}: no checkpoint is whole:\n" + "\n".join(passed_over))


def _verify(folder: Path, manifest: Manifest, grid: Grid) -> None:
    """Read all files, each by one rank, and compare their checksums."""
    files = manifest.files | manifest.texts
    names = sorted(files)[grid.rank :: grid.world_size]
    faults = check_files(folder, {name: files[name] for name in names})
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
    """The checkpoint's position, in other data as checkpoint.changed_data says."""
    progress = Progress(**found.manifest.progress)
    start = Start(progress, [f" loaded {found.folder} | iteration {progress.iteration} |"])
    choice = config.checkpoint.changed_data
    start.lines += in_other_data(progress, found.config, resolved, choice)
    return start


def _restore_streams(
    config: RunConfig, found: _Found, progress: Progress, grid: Grid, streams: RngStreams
) -> str:
    """Continue this rank's random streams where they are to be had; returns a line on it."""
    files = {rng_file(rank) for rank in range(grid.world_size)}
    if config.checkpoint.no_load_rng:
        why = "as asked for"
    elif found.manifest.layout != grid.sizes or not files <= found.manifest.files.keys():
        why = f"since it was saved from {found.manifest.saved_from}"
    else:
        with together(CheckpointError):
            states = load_rng(found.folder, grid.rank)
        if not gather_texts(None if streams.fit(states) else "other states"):
            streams.restore(states)
            return " random streams continued |"
        why = "since it was saved on another kind of device"
    streams.seed(config.training.seed + progress.iteration, grid)
    return f" random streams seeded anew, {why} |"
