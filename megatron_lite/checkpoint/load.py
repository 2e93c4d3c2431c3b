"""Read a checkpoint into any layout: the boxes that exist ∩ the boxes that this rank needs.

Each rank reads for itself, and only the bytes that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_lite.checkpoint.assemble import assemble, cast
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.checkpoint.manifest import STATES, Manifest, StoredFile
from megatron_lite.checkpoint.scan import compare_file, file_facts
from megatron_lite.checkpoint.tensor_file import TensorReaders
from megatron_lite.sharding.plan import differing_shapes

WEIGHTS = STATES[:1]


def load_fragments(
    folder: Path,
    manifest: Manifest,
    fragments: Iterable[Fragment],
    *,
    states: Iterable[str] = STATES,
    lenient: bool = False,
) -> int:
    """Fill states of the fragments from the checkpoint; returns the bytes that were read.

    Weights are widened to float32 where they are stored in 16 bits. `lenient` leaves tensors that
    the checkpoint lacks as they are. CheckpointError where boxes don't cover a tensor; see
    `check_tensors` for the rest.
    """
    total = 0
    stored = {state: state for state in states} | {WEIGHTS[0]: manifest.weight_state}
    with TensorReaders(folder) as readers:
        for fragment in fragments:
            for piece in fragment.pieces:
                if lenient and piece.tensor not in manifest.tensors:
                    continue
                for state in states:
                    target = fragment.view(state, piece)
                    boxes = assemble(manifest, readers, piece.tensor, stored[state], piece.box)
                    for part, values in boxes:
                        total += values.nbytes
                        widened = torch.from_numpy(cast(values, manifest.dtype, "float32"))
                        target[part.slices(piece.box.offset)].copy_(widened)
    return total


def shapes_of(fragments: Iterable[Fragment]) -> dict[str, tuple[int, ...]]:
    """The logical tensors that the fragments hold parts of, with their shapes."""
    return {piece.tensor: piece.shape for f in fragments for piece in f.pieces}


def check_tensors(
    manifest: Manifest, model: Mapping[str, tuple[int, ...]], *, lenient: bool = False
) -> list[str]:
    """Compare the checkpoint's logical tensors with those of the whole model.

    Raises CheckpointError, listing all that are missing, superfluous or of another shape; with
    `lenient` only for the shapes, and the others' lines are returned.
    """
    missing, superfluous, reshaped = [], [], []
    for name, (there, needed) in differing_shapes(manifest.shapes, model).items():
        if there is None:
            missing.append(f"{name}: not in the checkpoint")
        elif needed is None:
            superfluous.append(f"{name}: not in the model")
        else:
            reshaped.append(f"{name}: shape {there} in the checkpoint, {needed} in the model")
    lines = [*reshaped, *missing, *superfluous]
    if reshaped or (lines and not lenient):
        raise CheckpointError("the checkpoint does not fit the model:\n  " + "\n  ".join(lines))
    return lines


def check_files(folder: Path, files: Mapping[str, StoredFile]) -> list[str]:
    """A line for each file that is not what was written."""
    faults: list[str] = []
    for name, said in files.items():
        try:
            faults += compare_file(folder / name, file_facts(folder / name), said)
        except CheckpointError as error:
            faults.append(str(error))
    return faults


def load_rng(folder: Path, rank: int) -> Mapping[str, Tensor]:
    """The random streams that `rank` saved; they mean something on the same layout only."""
    path = folder / rng_file(rank)
    try:
        streams: Mapping[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    return streams


def rng_file(rank: int) -> str:
    """Name of the file with a rank's random streams."""
    return f"rng_{rank:05d}.safetensors"
