"""Checkpoints made by hand: random tensors, written by the safetensors library itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from megatron_lite.checkpoint.fingerprint import box_fingerprint
from megatron_lite.checkpoint.manifest import STATES, Manifest, StoredBox
from megatron_lite.checkpoint.scan import file_facts
from megatron_lite.pipeline.partition import partition_layers
from megatron_lite.sharding.placement import Box, Cut
from megatron_lite.sharding.plan import LogicalTensor, shard_contents

Arrays = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True)
class Shape:
    """A model's table of logical tensors."""

    layers: int = 4
    hidden: int = 16
    vocabulary: int = 90
    padded: int = 96
    heads: int = 8
    groups: int = 4
    tied: bool = False

    def tensors(self) -> dict[str, LogicalTensor]:
        """LLaMA's tensors, with a learned position table beside them."""
        h, rows = self.hidden, Cut(0, self.padded)
        key = h * self.groups // self.heads
        table = {
            "embedding.word_embeddings.weight": LogicalTensor((self.vocabulary, h), rows),
            "embedding.position_embeddings.weight": LogicalTensor((6, h), None),
            "final_norm.weight": LogicalTensor((h,), None),
        }
        if not self.tied:
            table["output_layer.weight"] = LogicalTensor((self.vocabulary, h), rows)
        for n in range(self.layers):
            table |= {
                f"layers.{n}.attention.query.weight": LogicalTensor((h, h), Cut(0, h)),
                f"layers.{n}.attention.key.weight": LogicalTensor((key, h), Cut(0, key)),
                f"layers.{n}.attention.output.weight": LogicalTensor((h, h), Cut(1, h)),
                f"layers.{n}.attention.output.bias": LogicalTensor((h,), None),
                f"layers.{n}.mlp.gate.weight": LogicalTensor((2 * h, h), Cut(0, 2 * h)),
                f"layers.{n}.mlp.gate.bias": LogicalTensor((2 * h,), Cut(0, 2 * h)),
                f"layers.{n}.mlp.down.weight": LogicalTensor((h, 2 * h), Cut(1, 2 * h)),
                f"layers.{n}.input_norm.weight": LogicalTensor((h,), None),
            }
        return table


@dataclass
class Made:
    """A checkpoint on the disk and what is in it."""

    root: Path
    folder: Path
    arrays: Arrays = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """Read anew."""
        return Manifest.read(self.folder)


def fingerprints(arrays: Arrays) -> dict[tuple[str, str], int]:
    """Of whole tensors."""
    return {
        key: box_fingerprint(values, Box((0,) * values.ndim, values.shape))
        for key, values in arrays.items()
    }


def make(
    root: Path,
    shape: Shape | None = None,
    *,
    step: int = 7,
    tp: int = 1,
    pp: int = 1,
    seed: int = 0,
    proof: bool = True,
) -> Made:
    """Write random states as ranks of a layout would; without `proof` no fingerprints."""
    shape = shape or Shape()
    tensors, rng = shape.tensors(), np.random.default_rng(seed)
    made = Made(root, root / f"global_step{step}")
    made.folder.mkdir(parents=True)
    made.arrays = {
        (name, state): rng.standard_normal(tensor.shape, dtype=np.float32)
        for name, tensor in tensors.items()
        for state in STATES
    }
    boxes, files = [], {}
    layers = partition_layers(shape.layers, pp)
    for rank in range(tp * pp):
        file, held = f"shard_{rank:05d}.safetensors", {}
        for name, box in shard_contents(
            tensors, layers, stage=rank // tp, tp_rank=rank % tp, tp_size=tp
        ):
            for state in STATES:
                stored = StoredBox.named(name, state, box, file)
                held[stored.key] = np.ascontiguousarray(made.arrays[name, state][box.slices()])
                boxes.append(stored)
        streams = f"rng_{rank:05d}.safetensors"
        save_file(held, made.folder / file)
        save_file({"cpu": rng.integers(0, 255, 64, dtype=np.uint8)}, made.folder / streams)
        files |= {name: file_facts(made.folder / name) for name in (file, streams)}
    manifest = Manifest(
        progress={"iteration": step, "consumed_samples": 8 * step, "updates": step, "skipped": 0},
        scalars={"optimizer_step": step, "loss_scaler": {}},
        layout={"tp": tp, "dp": 1, "pp": pp},
        model={"num_layers": shape.layers},
        tensors=tensors,
        boxes=boxes,
        files=files,
        fingerprints=fingerprints(made.arrays) if proof else {},
    )
    parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    (made.folder / "config.json").write_text(json.dumps({"parallel": parallel}))
    (made.folder / "origins.json").write_text("{}")
    texts = {name: file_facts(made.folder / name) for name in ("config.json", "origins.json")}
    replace(manifest, texts=texts).write(made.folder)
    (root / "latest").write_text(made.folder.name + "\n")
    return made


def read(folder: Path) -> Arrays:
    """All tensors of a float32 checkpoint, put together by the safetensors library and NumPy."""
    manifest = Manifest.read(folder)
    files = {name: load_file(folder / name) for name in {box.file for box in manifest.boxes}}
    arrays: Arrays = {}
    counts: dict[tuple[str, str], int] = {}
    for stored in manifest.boxes:
        key = (stored.tensor, stored.state)
        whole = arrays.setdefault(key, np.full(manifest.tensors[key[0]].shape, np.nan, np.float32))
        whole[stored.box.slices()] = files[stored.file][stored.key]
        counts[key] = counts.get(key, 0) + stored.box.numel
    for key, whole in arrays.items():
        assert counts[key] == prod(whole.shape), f"{key}: elements twice or not at all"
    return arrays


def assert_equal(found: Arrays, expected: Arrays) -> None:
    """The same tensors, bit by bit."""
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key].view(np.uint32), values.view(np.uint32), str(key))
