"""Where a run starts: from initial weights, or from a checkpoint that fits its config.

Called by build.py on every rank. The reading is checkpoint/'s, the states are the engine's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.load import check_tensors, load_fragments, load_rng, shapes_of
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.config.schema import RunConfig
from megatron_lite.engine.interface import Engine
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.random import RngStreams
from megatron_lite.mpu.reductions import together
from megatron_lite.progress import Progress


def restore(
    config: RunConfig, *, root: Path | None, grid: Grid, engine: Engine, streams: RngStreams
) -> tuple[Progress, str]:
    """Load the configured checkpoint from `root`; returns where the run stands and a line that
    says so. CheckpointError on every rank where any rank can't load."""
    if root is None:
        return Progress(), " starting from initial weights |"
    with together(CheckpointError):
        folder = find(config, root)
        manifest = None if folder is None else Manifest.read(folder)
    if folder is None or manifest is None:
        return Progress(), f" no checkpoint in {root}: starting from initial weights |"
    same_layout = manifest.layout == grid.sizes
    fragments = list(engine.fragments())
    everyones: list[Any] = [None] * grid.world_size
    dist.all_gather_object(everyones, shapes_of(fragments))
    check_tensors(manifest, {name: shape for held in everyones for name, shape in held.items()})
    with together(CheckpointError):
        load_fragments(folder, manifest, fragments)
        saved_streams = load_rng(folder, grid.rank) if same_layout else None
    engine.refresh()
    engine.load_scalars(manifest.scalars)
    progress = Progress(**manifest.progress)
    if saved_streams is not None:
        streams.restore(saved_streams)
        random = "random streams continued"
    else:
        streams.seed(config.training.seed + progress.iteration, grid)
        random = f"random streams seeded anew, since it was saved from {manifest.layout}"
    return progress, f" loaded {folder} | iteration {progress.iteration} | {random} |"


def find(config: RunConfig, root: Path) -> Path | None:
    """The checkpoint to load; None where there is none and the config allows that."""
    folder = store.find(root, step=config.checkpoint.ckpt_step)
    if folder is None and config.checkpoint.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"{root}: no checkpoint is there; correct checkpoint.load, or set "
            "checkpoint.exit_on_missing_checkpoint to false to start from initial weights"
        )
    return folder
