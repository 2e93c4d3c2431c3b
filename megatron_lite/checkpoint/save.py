"""Write a checkpoint: every rank its own boxes, in parallel, with no gather of tensors.

`Save` has three parts: `begin` and `finish` are collective, `write` between them is not and may run
in a thread. Only lists of boxes and hashes travel to rank 0, which writes the manifest and commits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.complete import complete
from megatron_lite.checkpoint.copies import Copies, differing_copies, fingerprint_copies
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fingerprint import Fingerprints, box_fingerprint
from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.checkpoint.load import rng_file
from megatron_lite.checkpoint.manifest import CODES, STATES, Manifest, StoredBox, StoredFile
from megatron_lite.checkpoint.scan import file_facts
from megatron_lite.checkpoint.tensor_file import TensorWriter
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.reductions import together
from megatron_lite.sharding.placement import Piece, Placement
from megatron_lite.sharding.plan import LogicalTensor

T = TypeVar("T")
DTYPE = "float32"


@dataclass(frozen=True)
class Snapshot:
    """What a rank contributes; `fragments` and `rng` are its own, the rest equal on all ranks."""

    fragments: Sequence[Fragment]
    rng: Mapping[str, Tensor]
    progress: dict[str, Any]
    scalars: dict[str, Any]
    grid: Grid
    config: dict[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each value of the config was written; a resumed run keeps those that somebody chose."""

    def copied(self) -> Snapshot:
        """With states of its own on the host, which further training does not change."""
        copies = [
            Fragment(f.placement, f.start, {k: v.cpu().clone() for k, v in f.states.items()})
            for f in self.fragments
        ]
        rng = {name: stream.clone() for name, stream in self.rng.items()}
        fields = {**vars(self), "fragments": copies, "rng": rng, "progress": dict(self.progress)}
        return Snapshot(**fields)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there."""

    folder: Path
    bytes: int
    differing: list[str]
    """A line for each tensor whose copies on several ranks are not the same bits."""


@dataclass(frozen=True)
class _Part:
    """What one rank wrote."""

    boxes: list[StoredBox]
    tensors: dict[str, LogicalTensor]
    files: dict[str, StoredFile]
    fingerprints: Fingerprints
    copies: Copies


def save(root: Path, snapshot: Snapshot, *, keep_last: int | None = None) -> Saved:
    """Write `<root>/global_step<iteration>` and point `latest` to it.

    Raises CheckpointError on every rank where any rank failed; other checkpoints stay as they are.
    """
    saving = Save(root, snapshot, keep_last=keep_last)
    saving.write()
    return saving.finish()


def require_room(root: Path, placements: Iterable[Placement]) -> None:
    """CheckpointError on every rank where a checkpoint would not fit beside those that are there.

    Collective. `placements` are those of a rank's parameters; of several replicas one names its.
    """
    counted = (placement for placement in placements if placement.counted)
    own = stored_bytes(piece for placement in counted for piece in placement.pieces())
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, own)
    with together(CheckpointError):
        if dist.get_rank() == 0:
            store.require_space(root, sum(sizes) - store.swept_bytes(root))


class Save:
    """One checkpoint on its way to the disk. All ranks make it, and finish it, together."""

    def __init__(self, root: Path, snapshot: Snapshot, *, keep_last: int | None = None) -> None:
        self._root, self._snapshot, self._keep_last = root, snapshot, keep_last
        self._step = int(snapshot.progress["iteration"])
        self._folder = store.unfinished(root, self._step)
        self._rank = dist.get_rank()
        self._part: _Part | None = None
        self._error: CheckpointError | None = None
        self._begin()

    def _begin(self) -> None:
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, _size(self._snapshot.fragments))
        with together(CheckpointError):
            if self._rank == 0:
                _told(self._root, lambda: store.sweep(self._root))
                _told(self._root, lambda: store.begin(self._root, self._step))
                store.require_space(self._root, sum(sizes))

    def write(self) -> None:
        """Write this rank's files. An error waits for `finish`."""
        try:
            self._part = self._write()
        except Exception as error:  # whatever it is: in a thread nobody else would hear of it
            self._error = _failed(self._root, error)

    def _write(self) -> _Part:
        shard = f"shard_{self._rank:05d}.safetensors"
        fragments = self._snapshot.fragments
        copies = fingerprint_copies(fragments, self._snapshot.grid)
        part = _Part([], {}, {}, Fingerprints(), copies)
        placed = [
            (fragment, piece, state)
            for state in STATES
            for fragment in fragments
            if fragment.placement.counted
            for piece in fragment.pieces
        ]
        for _, piece, state in placed:
            part.tensors[piece.tensor] = LogicalTensor(piece.shape, piece.cut)
            part.boxes.append(StoredBox.named(piece.tensor, state, piece.box, shard))
        shapes = {box.key: box.box.size for box in part.boxes}
        path = self._folder / shard
        with TensorWriter(path, shapes, CODES[DTYPE]) as writer, ThreadPoolExecutor(1) as beside:
            for fragment, piece, state in placed:
                values = fragment.view(state, piece).detach().cpu().numpy()
                fingerprint = beside.submit(box_fingerprint, values, piece.box)
                writer.write(values)
                part.fingerprints.add(piece.tensor, state, fingerprint.result())
        part.files[shard] = StoredFile(writer.bytes, writer.digest)
        self._write_rng(part)
        for name in part.files:  # each by its writer: a network file system syncs no other's
            store.sync(self._folder / name)
        return part

    def _write_rng(self, part: _Part) -> None:
        name = rng_file(self._rank)
        save_file(dict(self._snapshot.rng), self._folder / name)
        part.files[name] = file_facts(self._folder / name)

    def finish(self) -> Saved:
        """Commit, once all ranks have written; CheckpointError on every rank if one has failed."""
        try:
            with together(CheckpointError):
                if self._error is not None:
                    raise self._error
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, self._part)
            fingerprints = Fingerprints()
            for part in parts:
                fingerprints.update(part.fingerprints)
            with together(CheckpointError):
                if self._rank == 0:
                    _told(self._root, lambda: self._commit(parts, fingerprints))
        except CheckpointError:
            if self._rank == 0:  # a full disk has better use for the space
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return Saved(
            store.step_folder(self._root, self._step),
            sum(file.bytes for part in parts for file in part.files.values()),
            differing_copies(fingerprints, (part.copies for part in parts)),
        )

    def _commit(self, parts: list[_Part], fingerprints: Fingerprints) -> None:
        snapshot = self._snapshot
        manifest = Manifest(
            progress=snapshot.progress,
            scalars=snapshot.scalars,
            layout=snapshot.grid.sizes,
            model=snapshot.config["model"],
            tensors=dict(sorted({k: v for part in parts for k, v in part.tensors.items()}.items())),
            boxes=[box for part in parts for box in part.boxes],
            files={k: v for part in parts for k, v in part.files.items()},
            dtype=DTYPE,
            fingerprints=fingerprints.sums,
        )
        complete(
            self._folder,
            self._root,
            manifest,
            config=snapshot.config,
            origins=snapshot.origins,
            keep_last=self._keep_last,
        )


def stored_bytes(pieces: Iterable[Piece]) -> int:
    """What all states of these take in a checkpoint."""
    return sum(4 * piece.box.numel * len(STATES) for piece in pieces)


def _size(fragments: Iterable[Fragment]) -> int:
    """Bytes that a rank writes."""
    counted = (fragment for fragment in fragments if fragment.placement.counted)
    return stored_bytes(piece for fragment in counted for piece in fragment.pieces)


def _told(root: Path, work: Callable[[], T]) -> T:
    """Run and turn a failure to write into a CheckpointError that names the folder."""
    try:
        return work()
    except (OSError, SafetensorError) as error:
        raise _failed(root, error) from error


def _failed(root: Path, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    failure = CheckpointError(f"saving to {root} failed: {str(error) or type(error).__name__}")
    failure.__cause__ = error
    return failure
