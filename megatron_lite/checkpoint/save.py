"""Write a checkpoint: every rank its own boxes, in parallel, with no gather of tensors.

All ranks call `save` together. Only lists of boxes and file hashes travel to rank 0, which writes
the manifest and commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fragment import STATES, Fragment
from megatron_lite.checkpoint.manifest import Manifest, StoredBox, StoredFile
from megatron_lite.mpu.reductions import together
from megatron_lite.sharding.plan import LogicalTensor

_READ_BYTES = 1 << 24
T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """What a rank contributes; `fragments` and `rng` are its own, the rest equal on all ranks."""

    fragments: Iterable[Fragment]
    rng: Mapping[str, Tensor]
    progress: dict[str, Any]
    scalars: dict[str, Any]
    layout: dict[str, int]
    config: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """What one rank wrote."""

    boxes: list[StoredBox]
    tensors: dict[str, LogicalTensor]
    files: dict[str, StoredFile]


def save(root: Path, step: int, snapshot: Snapshot, *, keep_last: int | None = None) -> Path:
    """Write `<root>/global_step<step>` and point `latest` to it; returns the folder.

    Raises CheckpointError on every rank where any rank failed; older checkpoints stay as they are.
    """
    rank = dist.get_rank()
    folder = root / f".global_step{step}.tmp"
    with together(CheckpointError):
        if rank == 0:
            _told(root, lambda: store.begin(root, step))
    with together(CheckpointError):
        part = _told(root, lambda: _write_part(folder, snapshot, rank))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    with together(CheckpointError):
        if rank == 0:
            _told(root, lambda: _commit(folder, root, step, snapshot, parts, keep_last))
    return store.step_folder(root, step)


def _told(root: Path, work: Callable[[], T]) -> T:
    """Run and turn a failure to write into a CheckpointError that names the folder."""
    try:
        return work()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"saving to {root} failed: {error}") from error


def _write_part(folder: Path, snapshot: Snapshot, rank: int) -> _Part:
    shard, rng = f"shard_{rank:05d}.safetensors", f"rng_{rank:05d}.safetensors"
    values: dict[str, Tensor] = {}
    boxes: list[StoredBox] = []
    tensors: dict[str, LogicalTensor] = {}
    for fragment in snapshot.fragments:
        if not fragment.placement.counted:
            continue  # another rank writes this copy
        for piece in fragment.pieces:
            tensors[piece.tensor] = LogicalTensor(piece.shape, piece.cut)
            for state in STATES:
                key = f"{piece.tensor}|{state}|{','.join(map(str, piece.box.offset))}"
                values[key] = fragment.view(state, piece).cpu()
                boxes.append(StoredBox(piece.tensor, state, piece.box, shard, key))
    save_file(values, folder / shard)
    save_file(dict(snapshot.rng), folder / rng)
    files = {name: file_facts(folder / name) for name in (shard, rng)}
    return _Part(boxes, tensors, files)


def _commit(
    folder: Path,
    root: Path,
    step: int,
    snapshot: Snapshot,
    parts: list[_Part],
    keep_last: int | None,
) -> None:
    manifest = Manifest(
        progress=snapshot.progress,
        scalars=snapshot.scalars,
        layout=snapshot.layout,
        model=snapshot.config["model"],
        tensors=dict(sorted({k: v for part in parts for k, v in part.tensors.items()}.items())),
        boxes=[box for part in parts for box in part.boxes],
        files={k: v for part in parts for k, v in part.files.items()},
    )
    manifest.write(folder)
    (folder / "config.json").write_text(json.dumps(snapshot.config, indent=2) + "\n")
    store.commit(folder, root, step, keep_last=keep_last)


def file_facts(path: Path) -> StoredFile:
    """Size and hash of a file as it lies on the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return StoredFile(path.stat().st_size, digest.hexdigest())
