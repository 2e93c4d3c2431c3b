"""Rewrite a checkpoint so that a rank of another layout finds its boxes in one file; with a proof.

Each shard is written and then read again for its fingerprints; in the end they must be those that
were taken from memory when the source was saved. A stretch of a box is held at a time, so memory
does not grow with the model. Finished shards survive a kill. One process, no torch.
Called by tools/reshard_checkpoint.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.assemble import assemble, cast
from megatron_lite.checkpoint.complete import complete
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fingerprint import Fingerprints
from megatron_lite.checkpoint.manifest import CODES, WEIGHT, Manifest, StoredBox
from megatron_lite.checkpoint.scan import Scan, file_facts, merged, scan, uncovered
from megatron_lite.checkpoint.tensor_file import DTYPES, TensorReaders, TensorWriter, Values
from megatron_lite.pipeline.partition import partition_layers
from megatron_lite.sharding.plan import shard_contents

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Target:
    """What a checkpoint is rewritten for."""

    tp: int
    pp: int
    dp: int = 1
    """Recorded only: ZeRO partitions read parts of their shard's file."""
    layers: tuple[int, ...] | None = None
    """Transformer layers of each stage; None: as even as possible."""
    weights_only: bool = False
    dtype: str = "float32"


@dataclass(frozen=True)
class Shard:
    """One file of the new checkpoint: the boxes that a (stage, tensor rank) counts."""

    file: str
    boxes: tuple[StoredBox, ...]

    @property
    def numel(self) -> int:
        """Its numbers."""
        return sum(stored.box.numel for stored in self.boxes)


@dataclass(frozen=True)
class Plan:
    """All that is to be written, and what of the source is not."""

    source: Manifest
    target: Target
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the numbers of all shards."""
        width: int = DTYPES[CODES[self.target.dtype]].itemsize
        return width * sum(shard.numel for shard in self.shards)

    @property
    def dropped(self) -> list[str]:
        """What the result lacks, a line each."""
        lines = [
            f"{name}: random streams of the old layout"
            for name in self.source.files
            if name.startswith("rng_")
        ]
        if self.target.weights_only:
            gone = [state for state in self.source.states if state != self.source.weight_state]
            lines += [f"state {state} of every tensor" for state in gone]
        return lines

    def state_before(self, state: str) -> str:
        """The source's name of a state of the result."""
        return self.source.weight_state if state == WEIGHT else state


def plan(source: Manifest, target: Target) -> Plan:
    """The shards of the new checkpoint; CheckpointError where the model can't be cut so."""
    if target.dtype != source.dtype and not target.weights_only:
        raise CheckpointError(
            f"optimizer states stay {source.dtype}: {target.dtype} is for weights alone"
        )
    states = (WEIGHT,) if target.weights_only else source.states
    try:
        _check_heads(source, target.tp)
        layers = partition_layers(source.model["num_layers"], target.pp, target.layers)
        shards = [
            _shard(source, layers, states, stage=stage, tp_rank=rank, tp_size=target.tp)
            for stage in range(target.pp)
            for rank in range(target.tp)
        ]
    except ValueError as error:
        raise CheckpointError(f"tensor {target.tp} x pipeline {target.pp}: {error}") from error
    return Plan(source, target, tuple(shard for shard in shards if shard.boxes))


def _check_heads(source: Manifest, tp: int) -> None:
    """Tensors might be cut where attention can't be: no run could load the result."""
    for name in ("num_attention_heads", "num_query_groups"):
        count = source.model.get(name)
        if count is not None and count % tp:
            raise ValueError(f"model.{name} {count} can't be divided by {tp}")


def _shard(
    source: Manifest,
    layers: Sequence[range],
    states: Sequence[str],
    *,
    stage: int,
    tp_rank: int,
    tp_size: int,
) -> Shard:
    file = f"shard_{stage * tp_size + tp_rank:05d}.safetensors"
    held = list(
        shard_contents(source.tensors, layers, stage=stage, tp_rank=tp_rank, tp_size=tp_size)
    )
    boxes = [StoredBox.named(name, state, box, file) for state in states for name, box in held]
    return Shard(file, tuple(boxes))


def reshard(
    source: Path,
    root: Path,
    plan: Plan,
    *,
    workers: int = 1,
    progress: Progress = lambda count: None,
) -> tuple[Path, Fingerprints]:
    """Rewrite the checkpoint in folder `source` as one of the same step under `root`.

    `progress` is told the bytes of each pass; in all source + 2 × result. Returns the new folder
    and the fingerprints that source and result share. CheckpointError, with nothing committed,
    where the source is damaged, the result differs from it, or `root` has that step already.
    """
    step = plan.source.step
    if store.exists(root, step):
        there = store.step_folder(root, step)
        if there.resolve() == source.resolve():
            raise CheckpointError(f"{there} is the source; write the result to another folder")
        raise CheckpointError(f"{there} exists; remove it first, or write to another folder")
    _require_whole(scan(source, [], files=plan.source.texts).faults)
    config, origins = store.read_config(source)
    folder = _working_folder(source, root, plan)
    before = _fingerprints(source, plan, progress)
    with ThreadPoolExecutor(workers) as pool:
        found = merged(pool.map(partial(_make, source, folder, plan, progress), plan.shards))
    if wrong := before.differing(found.fingerprints):
        _explain(source, folder, plan, [*found.faults, *(f"{t} ({s})" for t, s in wrong)])
    result = replace(
        plan.source,
        layout={"tp": plan.target.tp, "dp": plan.target.dp, "pp": plan.target.pp},
        boxes=[box for shard in plan.shards for box in shard.boxes],
        files=found.files,
        dtype=plan.target.dtype,
        fingerprints=found.fingerprints.sums,
    )
    config["parallel"] |= _parallel(plan.target)
    made = complete(folder, root, result, config=config, origins=origins)
    (made / store.RESUMABLE).unlink()
    return made, found.fingerprints


def _fingerprints(source: Path, plan: Plan, progress: Progress) -> Fingerprints:
    """What the result must hold: as taken when it was saved, else of the source as it lies there.

    CheckpointError where the source has to be read and is damaged.
    """
    manifest, target = plan.source, plan.target
    if target.dtype == manifest.dtype and manifest.fingerprints:
        progress(manifest.bytes)
        sums = manifest.fingerprints
    else:
        convert = partial(cast, source=manifest.dtype, target=target.dtype)
        found = scan(source, manifest.boxes, files=manifest.files, cast=convert, progress=progress)
        _require_whole([*found.faults, *uncovered(manifest)])
        sums = found.fingerprints.sums
    if not target.weights_only:
        return Fingerprints(sums)
    weights = {tensor: v for (tensor, s), v in sums.items() if s == manifest.weight_state}
    return Fingerprints({(tensor, WEIGHT): value for tensor, value in weights.items()})


def _require_whole(faults: list[str]) -> None:
    """CheckpointError for a source that is not what was written."""
    if faults:
        raise CheckpointError("the source is damaged:\n  " + "\n  ".join(faults))


def _explain(source: Path, folder: Path, plan: Plan, wrong: list[str]) -> NoReturn:
    """Say why the result is not what was saved: the source is damaged, or it was written wrong."""
    shutil.rmtree(folder)
    _require_whole(scan(source, plan.source.boxes, files=plan.source.files).faults)
    raise CheckpointError(
        f"{folder}: the result was not what {source} holds, and was removed:\n  "
        + "\n  ".join(wrong)
    )


def _make(source: Path, folder: Path, plan: Plan, progress: Progress, shard: Shard) -> Scan:
    """Write a shard, unless it is there, then read it from the disk for the proof."""
    path = folder / shard.file
    try:
        if path.is_file():
            progress(path.stat().st_size)
        else:
            with TensorReaders(source) as readers:
                _write_shard(path, shard, plan, readers, progress)
    except OSError as error:
        raise CheckpointError(
            f"writing to {folder} failed: {error}; the same command goes on from here"
        ) from error
    return scan(folder, shard.boxes, progress=progress)


def _write_shard(
    path: Path, shard: Shard, plan: Plan, readers: TensorReaders, progress: Progress
) -> None:
    before, after = plan.source.dtype, plan.target.dtype
    unfinished = path.with_suffix(".part")
    shapes = {stored.key: stored.box.size for stored in shard.boxes}
    with TensorWriter(unfinished, shapes, CODES[after]) as writer:
        for stored in shard.boxes:
            state = plan.state_before(stored.state)
            for _, values in assemble(plan.source, readers, stored.tensor, state, stored.box):
                converted: Values = cast(values, before, after)
                writer.write(converted)
                progress(converted.nbytes)
    unfinished.rename(path)


def _working_folder(source: Path, root: Path, plan: Plan) -> Path:
    """The folder to write into; what an earlier run of the same job left there is kept.

    A marker in it says what it is made from.
    """
    job = json.dumps(
        {"source": file_facts(source / "manifest.json").xxh3_128, "target": asdict(plan.target)}
    )
    folder = store.unfinished(root, plan.source.step)
    marker = folder / store.RESUMABLE
    if not (marker.is_file() and marker.read_text() == job):
        store.begin(root, plan.source.step)
        marker.write_text(job)
    there = sum(path.stat().st_size for path in folder.iterdir())
    store.require_space(root, plan.bytes - there)
    return folder


def _parallel(target: Target) -> dict[str, Any]:
    """What the config of a run on the new layout says of it."""
    return {
        "tensor_model_parallel_size": target.tp,
        "pipeline_model_parallel_size": target.pp,
        "pipeline_model_parallel_layout": None if target.layers is None else list(target.layers),
    }
