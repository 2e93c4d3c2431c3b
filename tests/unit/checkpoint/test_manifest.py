"""A manifest that is not what was written, or makes no sense, is refused before it does harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.checkpoint.assemble import assemble
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import Manifest, StoredBox
from megatron_lite.checkpoint.tensor_file import TensorReaders
from megatron_lite.sharding.placement import Box
from tests.checkpoints import Made, make


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path, tp=2)


def test_one_changed_digit_is_noticed(made: Made) -> None:
    path = made.folder / "manifest.json"
    text = path.read_bytes()
    for before, after in [(b'"offset": [8,', b'"offset": [7,'), (b'"updates": 7', b'"updates": 8')]:
        assert before in text
        path.write_bytes(text.replace(before, after, 1))
        with pytest.raises(CheckpointError, match="its checksum is another"):
            Manifest.read(made.folder)
    path.write_bytes(text)
    assert Manifest.read(made.folder) == made.manifest


def edited(made: Made, change: Callable[[dict[str, Any]], object]) -> None:
    """As another program might write it: without a checksum."""
    raw = json.loads((made.folder / "manifest.json").read_text())
    del raw["checksum"]
    change(raw)
    (made.folder / "manifest.json").write_text(json.dumps(raw))


def test_without_a_checksum_it_is_read(made: Made) -> None:
    before = made.manifest
    edited(made, lambda raw: None)
    assert made.manifest == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda raw: raw["boxes"][0].update(file="../x"), "which is not in the list of files"),
        (lambda raw: raw["files"].update({"../x": {"bytes": 1, "xxh3_128": "0"}}), "elsewhere"),
        (lambda raw: raw["boxes"][0].update(offset=[0]), "has not the dimensions of its shape"),
        (lambda raw: raw["boxes"][0].update(tensor="other"), "'other'"),
        (lambda raw: raw["model"].pop("num_layers"), "num_layers"),
        (lambda raw: raw["progress"].update(iteration="7"), "what is no whole number"),
        (lambda raw: raw["tensors"]["final_norm.weight"].update(dtype="float16"), "one of"),
    ],
)
def test_what_makes_no_sense_is_refused(
    change: Callable[[dict[str, Any]], object], told: str, made: Made
) -> None:
    edited(made, change)
    with pytest.raises(CheckpointError, match="damaged") as error:
        Manifest.read(made.folder)
    assert told in str(error.value)


def changed(made: Made, box: StoredBox, **fields: Any) -> Manifest:
    boxes = [replace(one, **fields) if one == box else one for one in made.manifest.boxes]
    return replace(made.manifest, boxes=boxes)


def test_files_must_hold_what_the_manifest_says(made: Made) -> None:
    """A box that says more rows than lie under its key would read its neighbour's numbers."""
    name, state = "final_norm.weight", "fp32"
    (box,) = made.manifest.stored[name, state]
    whole = Box((0,), (16,))
    other = next(b for b in made.manifest.boxes if b.file == box.file and b.box.size != (16,))
    for manifest, told in [
        (changed(made, box, key=other.key), "the manifest says"),
        (replace(made.manifest, dtype="bfloat16"), "'F32'"),
        (changed(made, box, key="gone"), "holds no tensor gone"),
    ]:
        with TensorReaders(made.folder) as readers, pytest.raises(CheckpointError, match=told):
            list(assemble(manifest, readers, name, state, whole))
    with TensorReaders(made.folder) as readers:
        ((_, values),) = assemble(made.manifest, readers, name, state, whole)
    np.testing.assert_array_equal(values, made.arrays[name, state])
