"""Write a DeepSpeed universal checkpoint, which an engine with `load_universal` continues from.

A folder a parameter, under Hugging Face's names, each with a file a state; and what
deepspeed/checkpoint/universal_checkpoint.py, runtime/base_optimizer.py and engine.load_checkpoint
read beside them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.assemble import assemble
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.inspection import locate
from megatron_lite.checkpoint.load import check_files
from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.checkpoint.scan import uncovered
from megatron_lite.checkpoint.tensor_file import TensorReaders
from megatron_lite.config.batch import global_batch_size_at, train_iters
from megatron_lite.config.schema import ModelConfig, RunConfig
from megatron_lite.convert.foreign import refuse, written
from megatron_lite.convert.hugging_face import Parts, join, parameters, parts_of
from megatron_lite.convert.hugging_face_config import FILE_NAME, fields
from megatron_lite.convert.zero import MODEL_FILE
from megatron_lite.engine.lr_schedule import batch_scaling_factor, learning_rate
from megatron_lite.layers.embedding import WORD_EMBEDDINGS
from megatron_lite.sharding.placement import Box

LATEST = "latest_universal"
DS_VERSION = "0.19.8"
"""The release whose reader this was written for; it refuses a checkpoint without a version."""
_MOST_GROUPS = 256
"""DeepSpeed loads as many parameter groups as both sides have, so this side has plenty. An empty
that names nothing but a rate leaves weight decay and betas to the new engine's config."""


def export(
    load: Path,
    save: Path,
    *,
    step: int | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Convert a checkpoint of ours to `<save>/global_step<N>_universal`; returns that folder.

    `progress` is told bytes, 4 a number. CheckpointError where it is damaged, holds weights alone,
    is of a model that Hugging Face's classes are not, or the folder exists.
    """
    source = locate(load, step)
    manifest = Manifest.read(source)
    if set(manifest.states) != set(STATES):
        raise CheckpointError(
            f"{source}: holds {', '.join(manifest.states)} alone; a universal checkpoint needs "
            f"{', '.join(STATES)}"
        )
    config = _config(source)
    parts = parts_of(config.model, manifest.tensors)
    target = save / f"global_step{manifest.step}_universal"
    if target.exists():
        raise CheckpointError(f"{target} exists; remove it first")
    refuse(
        f"{source} is damaged",
        [*check_files(source, manifest.files | manifest.texts), *uncovered(manifest)],
    )
    working = save / f".{target.name}.tmp"
    with written(save, working):
        save.mkdir(parents=True, exist_ok=True)
        for left in save.glob(".global_step*_universal.tmp"):  # of a killed export
            shutil.rmtree(left)
        store.require_space(save, size(manifest))
        _write_parameters(source, manifest, parts, working / "zero", progress)
        _save(working / "zero" / "optimizer_state.pt", _optimizer_state(config, manifest))
        _save(working / MODEL_FILE, _engine_state(manifest))
        _write_config(working / FILE_NAME, config.model, manifest)
        _commit(working, target)
    return target


def _commit(working: Path, target: Path) -> None:
    """Give a complete folder its name once it is on the disk, then point to it."""
    for path in (*working.rglob("*"), working):
        store.sync(path)
    working.rename(target)
    store.sync(target.parent)
    pointer = target.parent / f".{LATEST}.tmp"
    pointer.write_text(target.name)
    store.sync(pointer)
    pointer.rename(target.parent / LATEST)
    store.sync(target.parent)


def size(manifest: Manifest) -> int:
    """Bytes of the numbers that are written."""
    return sum(4 * stored.box.numel for stored in manifest.boxes)


def _write_parameters(
    source: Path, manifest: Manifest, parts: Parts, zero: Path, progress: Callable[[int], None]
) -> None:
    """A folder a parameter, one state of one parameter in memory at a time."""
    step = torch.tensor(float(manifest.scalars["optimizer_step"]))
    with TensorReaders(source) as readers:
        for parameter, names in parameters(parts).items():
            folder = zero / parameter
            folder.mkdir(parents=True)
            _save(folder / "step.pt", step)
            for state in STATES:
                values = [(parts[n], _whole(manifest, readers, n, state)) for n in names]
                whole = join(values)
                _save(folder / f"{state}.pt", {"param": whole})
                progress(4 * whole.numel())


def _whole(manifest: Manifest, readers: TensorReaders, tensor: str, state: str) -> Tensor:
    """One state of a logical tensor, from the boxes that hold it."""
    shape = manifest.tensors[tensor].shape
    whole = np.empty(shape, dtype=np.float32)
    box = Box((0,) * len(shape), shape)
    for part, values in assemble(manifest, readers, tensor, state, box):
        whole[part.slices()] = values
    return torch.from_numpy(whole)


def _config(source: Path) -> RunConfig:
    """The run that wrote the checkpoint."""
    try:
        return RunConfig.model_validate(store.read_json(source, store.CONFIG))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise CheckpointError(
            f"{source / store.CONFIG}: is no run config of this version; export the checkpoint "
            "with the version that saved it:\n  " + "\n  ".join(faults)
        ) from error


def _optimizer_state(config: RunConfig, manifest: Manifest) -> Mapping[str, Any]:
    """What is common to all parameters. No loss scaler: that would be a pickled class.

    The rate is that of the next update: DeepSpeed asks a schedule only after each step.
    """
    progress = manifest.progress
    batch = global_batch_size_at(config.training, progress["consumed_samples"])
    rate = batch_scaling_factor(config.optimizer, batch) * learning_rate(
        config.optimizer,
        update=progress["updates"] + 1,
        total_updates=train_iters(config.training),
    )
    return {
        "param_groups": [{"params": [], "lr": rate} for _ in range(_MOST_GROUPS)],
        "ds_version": DS_VERSION,
    }


def _engine_state(manifest: Manifest) -> Mapping[str, Any]:
    """Counters of the engine and of DeepSpeed's (or a lambda's) learning-rate schedule."""
    progress = manifest.progress
    updates = progress["updates"]
    return {
        "module": {},
        "lr_scheduler": {"last_batch_iteration": updates - 1, "last_epoch": updates},
        "global_steps": progress["iteration"],
        "global_samples": progress["consumed_samples"],
        "skipped_steps": progress["skipped"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": DS_VERSION,
    }


def _write_config(path: Path, model: ModelConfig, manifest: Manifest) -> None:
    """The config.json to make the Hugging Face model from."""
    size = manifest.tensors[WORD_EMBEDDINGS].shape[0]
    path.write_text(json.dumps(fields(model, vocab_size=size), indent=2) + "\n")


def _save(path: Path, value: Any) -> None:
    """torch.save that is on the disk when it returns."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
