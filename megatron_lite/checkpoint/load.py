"""Read a checkpoint into any layout: the boxes that exist ∩ the boxes that this rank needs.

Each rank reads for itself, and only the bytes that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fragment import STATES, Fragment
from megatron_lite.checkpoint.manifest import Manifest, StoredBox
from megatron_lite.sharding.placement import Piece
from megatron_lite.sharding.plan import copies


def load_fragments(folder: Path, manifest: Manifest, fragments: Iterable[Fragment]) -> None:
    """Fill the fragments' states from the checkpoint.

    Raises CheckpointError where boxes don't cover a tensor; see `check_tensors` for the rest.
    """
    stored: dict[tuple[str, str], list[StoredBox]] = {}
    for box in manifest.boxes:
        stored.setdefault((box.tensor, box.state), []).append(box)
    with ExitStack() as stack:
        files: dict[str, Any] = {}

        def opened(name: str) -> Any:
            if name not in files:
                files[name] = stack.enter_context(_open(folder / name))
            return files[name]

        for fragment in fragments:
            for piece in fragment.pieces:
                for state in STATES:
                    boxes = stored.get((piece.tensor, state), [])
                    _fill(fragment.view(state, piece), piece, boxes, opened)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error


def _fill(target: Tensor, piece: Piece, boxes: Iterable[StoredBox], opened: Any) -> None:
    try:
        parts = copies(piece.box, boxes)
    except ValueError as error:
        raise CheckpointError(f"{piece.tensor}: the checkpoint holds {error}") from error
    for copy in parts:
        stored = copy.source
        values = opened(stored.file).get_slice(stored.key)[copy.part.slices(stored.box.offset)]
        target[copy.part.slices(piece.box.offset)].copy_(values)


def shapes_of(fragments: Iterable[Fragment]) -> dict[str, tuple[int, ...]]:
    """The logical tensors that the fragments hold parts of, with their shapes."""
    return {piece.tensor: piece.shape for f in fragments for piece in f.pieces}


def check_tensors(manifest: Manifest, model: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the checkpoint's logical tensors with those of the whole model.

    Raises CheckpointError, listing all that are missing, superfluous or of another shape.
    """
    faults = []
    for name in sorted({*manifest.tensors, *model}):
        there, needed = manifest.tensors.get(name), model.get(name)
        if there is None:
            faults.append(f"{name}: not in the checkpoint")
        elif needed is None:
            faults.append(f"{name}: not in the model")
        elif there.shape != needed:
            faults.append(f"{name}: shape {there.shape} in the checkpoint, {needed} in the model")
    if faults:
        raise CheckpointError("the checkpoint does not fit the model:\n  " + "\n  ".join(faults))


def load_rng(folder: Path, rank: int) -> Mapping[str, Tensor]:
    """The random streams that `rank` saved; they mean something on the same layout only."""
    path = folder / f"rng_{rank:05d}.safetensors"
    try:
        streams: Mapping[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    return streams
