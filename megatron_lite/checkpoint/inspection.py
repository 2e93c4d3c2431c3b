"""What is in a checkpoint, and where two differ; text for tools/inspect_checkpoint.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.assemble import assemble, cast
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fingerprint import Fingerprints
from megatron_lite.checkpoint.manifest import FILE_NAME, Manifest
from megatron_lite.checkpoint.tensor_file import TensorReaders, Values, stretches
from megatron_lite.sharding.placement import Box
from megatron_lite.sharding.plan import differing_shapes


def locate(path: Path, step: int | None = None) -> Path:
    """The folder of one checkpoint: `path` itself, or the latest or asked-for step under it."""
    if step is None and (path / FILE_NAME).is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    folder = store.find(path, step=step)
    if folder is None:
        raise CheckpointError(f"{path}: no checkpoint is there")
    return folder


def describe(folder: Path, manifest: Manifest) -> Iterator[str]:
    """A few lines on the whole."""
    progress = manifest.progress
    numel = sum(prod(tensor.shape) for tensor in manifest.tensors.values())
    yield f"folder      {folder}"
    yield f"format      version {manifest.format_version}"
    yield f"step        {manifest.step}"
    yield f"samples     {progress['consumed_samples']}"
    for source, count in progress.get("source_samples", {}).items():
        yield f"            {count} of {source}"
    yield f"updates     {progress['updates']} ({progress['skipped']} steps skipped)"
    yield f"saved from  {manifest.saved_from}"
    yield f"states      {', '.join(manifest.states)} ({manifest.dtype})"
    yield f"parameters  {numel} in {len(manifest.tensors)} logical tensors"
    size = f"{manifest.bytes / 1e6:.1f} MB"
    yield f"files       {len(manifest.files)}, {size}, {len(manifest.boxes)} boxes"


def listing(manifest: Manifest) -> Iterator[str]:
    """A line a tensor: name, shape, how it is cut, in how many boxes each state lies."""
    width = max(map(len, manifest.tensors), default=0)
    for name, tensor in manifest.tensors.items():
        cut = "whole" if tensor.cut is None else f"cut along {tensor.cut.dim}"
        boxes = len(manifest.stored.get((name, manifest.weight_state), []))
        yield f"{name:<{width}}  {tensor.shape!s:<16}  {cut:<11}  {boxes} boxes"


def differences(one: Manifest, other: Manifest) -> Iterator[str]:
    """What differs but the numbers: position, shared state, model and tensors."""
    for section in ("progress", "scalars", "model"):
        yield from _differing_values(section, getattr(one, section), getattr(other, section))
    for name, shapes in differing_shapes(one.shapes, other.shapes).items():
        yield f"tensor {name}: shape {shapes[0]} | {shapes[1]}"
    if set(one.states) != set(other.states) or one.dtype != other.dtype:
        yield f"states: {one.states} {one.dtype} | {other.states} {other.dtype}"


def _differing_values(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            yield from _differing_values(f"{path}.{key}", one.get(key), other.get(key))
    elif one != other:
        yield f"{path}: {one} | {other}"


def differing_tensors(one: Fingerprints, other: Fingerprints) -> list[tuple[str, str]]:
    """(tensor, state) whose numbers differ, among those that both have."""
    return [key for key in one.differing(other) if key in one.sums and key in other.sums]


def first_difference(
    tensor: str, state: str, one: tuple[Path, Manifest], other: tuple[Path, Manifest]
) -> str:
    """Where a state of a tensor differs first, with both numbers, and by how much at most."""
    found: str | None = None
    largest, count = 0.0, 0
    for part, a, b in _both(tensor, state, one, other):
        unequal = np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))
        if not len(unequal):
            continue
        count += len(unequal)
        with np.errstate(invalid="ignore"):
            apart = np.abs(a.ravel()[unequal] - b.ravel()[unequal])
        largest = float(np.maximum(largest, np.max(apart)))  # NaN stays NaN
        if found is None:
            index = np.unravel_index(unequal[0], part.size)
            place = [int(i) + o for i, o in zip(index, part.offset, strict=True)]
            found = f"first at {place}: {a[index]!r} | {b[index]!r}"
    return f"{tensor} ({state}): {count} numbers differ, by at most {largest:g}; {found}"


def _both(
    tensor: str, state: str, one: tuple[Path, Manifest], other: tuple[Path, Manifest]
) -> Iterator[tuple[Box, Values, Values]]:
    """Stretches of a tensor as float32, from both checkpoints."""
    shape = one[1].tensors[tensor].shape
    whole = Box((0,) * len(shape), shape)

    def as_float32(manifest: Manifest, readers: TensorReaders, part: Box) -> Values:
        values = np.empty(part.size, dtype=np.float32)
        for inner, read in assemble(manifest, readers, tensor, state, part):
            values[inner.slices(part.offset)] = cast(read, manifest.dtype, "float32")
        return values

    with TensorReaders(one[0]) as first, TensorReaders(other[0]) as second:
        for part in stretches(whole, np.dtype(np.float32).itemsize):
            yield part, as_float32(one[1], first, part), as_float32(other[1], second, part)
