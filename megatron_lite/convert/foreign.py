"""Foreign: a checkpoint of another program seen as logical tensors, and how it becomes ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.complete import complete
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fingerprint import Fingerprints, box_fingerprint
from megatron_lite.checkpoint.manifest import CODES, FILE_NAME, Manifest, StoredBox, StoredFile
from megatron_lite.checkpoint.tensor_file import TensorWriter, Values
from megatron_lite.config.load import resolved_dict
from megatron_lite.convert.target import Target
from megatron_lite.progress import Progress
from megatron_lite.sharding.placement import Box
from megatron_lite.sharding.plan import differing_shapes

Shapes = Mapping[str, tuple[int, ...]]
DTYPE = "float32"
_FILE = "shard_00000.safetensors"


@dataclass(frozen=True)
class Foreign:
    """What a checkpoint of another program gives."""

    folder: Path
    layout: str
    """How its program lays it out, in the words of `understood`."""
    position: Progress
    scalars: dict[str, Any]
    """Optimizer step and loss scaler, as a manifest keeps them."""
    states: tuple[str, ...]
    read: Callable[[str, str], Tensor]
    """(logical tensor, state) → values of the logical shape, of any dtype."""
    notes: list[str] = field(default_factory=list)
    """What could not be checked or is not converted, a line each."""


def write(
    root: Path,
    target: Target,
    foreign: Foreign,
    *,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Write `<root>/global_step<iteration>`, a tensor at a time, and point `latest` to it.

    `progress` is told bytes, 4 a number. CheckpointError, with nothing committed, where that step
    is there already or the disk is full.
    """
    step = foreign.position.iteration
    if store.exists(root, step):
        raise CheckpointError(f"{store.step_folder(root, step)} exists; remove it first")
    with written(root, store.unfinished(root, step)):
        folder = store.begin(root, step)
        store.require_space(root, size(target, foreign))
        manifest = _write_tensors(folder, target, foreign, progress)
        loaded = target.loaded
        config = resolved_dict(loaded.config)
        return complete(folder, root, manifest, config=config, origins=loaded.origins)


@contextmanager
def written(root: Path, working: Path) -> Iterator[None]:
    """Around writing to a working folder: it goes where that fails, and the error names `root`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"writing to {root} failed: {error}") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)  # renamed by now where all went well


@contextmanager
def understood(folder: Path, kind: str) -> Iterator[None]:
    """Around reading: what a file of another layout makes fail becomes a CheckpointError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        raise CheckpointError(
            f"{folder}: is not laid out as {kind} ({type(e).__name__}: {e})"
        ) from e


def size(target: Target, foreign: Foreign) -> int:
    """Bytes of the numbers that are written."""
    return 4 * len(foreign.states) * sum(prod(tensor.shape) for tensor in target.table.values())


def _write_tensors(
    folder: Path, target: Target, foreign: Foreign, progress: Callable[[int], None]
) -> Manifest:
    boxes = [
        StoredBox.named(name, state, Box((0,) * len(tensor.shape), tensor.shape), _FILE)
        for state in foreign.states
        for name, tensor in target.table.items()
    ]
    shapes = {stored.key: stored.box.size for stored in boxes}
    path, fingerprints = folder / _FILE, Fingerprints()
    with TensorWriter(path, shapes, CODES[DTYPE]) as writer, ThreadPoolExecutor(1) as beside:
        for stored in boxes:
            values = _read(foreign, stored)
            fingerprint = beside.submit(box_fingerprint, values, stored.box)
            writer.write(values)
            fingerprints.add(stored.tensor, stored.state, fingerprint.result())
            progress(4 * stored.box.numel)
    return Manifest(
        progress=asdict(foreign.position),
        scalars=foreign.scalars,
        layout={"tp": 1, "dp": 1, "pp": 1},
        model=resolved_dict(target.loaded.config)["model"],
        tensors=target.table,
        boxes=boxes,
        files={_FILE: StoredFile(writer.bytes, writer.digest)},
        dtype=DTYPE,
        fingerprints=fingerprints.sums,
    )


def _read(foreign: Foreign, stored: StoredBox) -> Values:
    """One state of a logical tensor in float32; CheckpointError where the source has no such."""
    with understood(foreign.folder, foreign.layout):
        values = foreign.read(stored.tensor, stored.state)
        if tuple(values.shape) != stored.box.size:
            raise CheckpointError(
                f"{foreign.folder}: {stored.tensor} ({stored.state}) has shape "
                f"{tuple(values.shape)}, not {stored.box.size}"
            )
        array: Values = values.detach().to(torch.float32).contiguous().numpy()
        return array


def pointed(pointer: Path) -> str:
    """What a file like `latest` names; CheckpointError where it is missing or no text."""
    if not pointer.parent.is_dir():
        raise CheckpointError(f"{pointer.parent}: no such folder")
    try:
        return pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{pointer}: missing; name a step with --step") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{pointer}: damaged ({error}); name a step with --step") from error


def existing(folder: Path) -> Path:
    """The folder; CheckpointError that names those beside it where it is not there, and where it
    is a checkpoint of ours."""
    if (folder / FILE_NAME).is_file():
        raise CheckpointError(f"{folder}: is a checkpoint of ours, which needs no import")
    if folder.is_dir():
        return folder
    root = folder.parent
    there = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    raise CheckpointError(f"{folder}: no such folder; there: {', '.join(there) or 'none'}")


def check_shapes(where: Path, found: Shapes, wanted: Shapes) -> None:
    """CheckpointError with a line for every tensor that is missing, superfluous or reshaped."""
    lines = []
    for name, (there, needed) in differing_shapes(found, wanted).items():
        if there is None:
            lines.append(f"{name}: missing, the config's model has it with shape {needed}")
        elif needed is None:
            lines.append(f"{name}: superfluous, the config's model has no place for it")
        else:
            lines.append(f"{name}: shape {there}, the config's model has {needed}")
    refuse(f"{where} does not hold the model of the config; correct its model section", lines)


def refuse(head: str, lines: Sequence[str]) -> None:
    """CheckpointError with all lines, if there are any."""
    if lines:
        raise CheckpointError(f"{head}:\n  " + "\n  ".join(lines))
