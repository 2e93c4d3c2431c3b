"""Put boxes of logical tensors together from the boxes that a checkpoint stores, and cast them.

What is asked for at a time is held in memory, no more. Used by reshard and inspection.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import CODES, Manifest, StoredBox
from megatron_lite.checkpoint.tensor_file import DTYPES, TensorReaders, Values, stretches
from megatron_lite.sharding.placement import Box
from megatron_lite.sharding.plan import Boxes, Copy, copies


def assemble(
    manifest: Manifest, readers: TensorReaders, tensor: str, state: str, box: Box
) -> Iterator[tuple[Box, Values]]:
    """A box of a state of a tensor, some rows at a time.

    CheckpointError for a gap, and where a file does not hold what the manifest says.
    """
    dtype = DTYPES[CODES[manifest.dtype]]
    stored = manifest.stored.get((tensor, state), Boxes([]))
    for part in stretches(box, dtype.itemsize):
        try:
            parts = copies(part, stored)
        except ValueError as error:
            raise CheckpointError(f"{tensor} ({state}): the checkpoint holds {error}") from error
        if len(parts) == 1:
            yield part, _read(manifest, readers, parts[0])
            continue
        values = np.empty(part.size, dtype=dtype)
        for copy in parts:
            values[copy.part.slices(part.offset)] = _read(manifest, readers, copy)
        yield part, values


def _read(manifest: Manifest, readers: TensorReaders, copy: Copy[StoredBox]) -> Values:
    """The common part, from the file of the stored box."""
    stored, reader = copy.source, readers[copy.source.file]
    there = reader.code(stored.key), reader.shape(stored.key)
    said = CODES[manifest.dtype], stored.box.size
    if there != said:
        raise CheckpointError(f"{reader.path}: {stored.key} is {there}, the manifest says {said}")
    offset = tuple(a - b for a, b in zip(copy.part.offset, stored.box.offset, strict=True))
    return reader.read(stored.key, Box(offset, copy.part.size))


def cast(values: Values, source: str, target: str) -> Values:
    """Values of a manifest's dtype as another; bfloat16 is its bits on either side.

    To fewer bits they are rounded to nearest, ties to even, as torch does.
    """
    if source == target:
        return values
    if source == "bfloat16":
        wide: Values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        wide = values.astype(np.float32)
    if target == "bfloat16":
        return _to_bfloat16(wide)
    with np.errstate(over="ignore"):  # beyond float16's range is infinity, as in torch
        narrow: Values = wide.astype(DTYPES[CODES[target]])
    return narrow


def _to_bfloat16(values: Values) -> Values:
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    # The sum would carry a NaN's bits into the sign, or make it infinite.
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
