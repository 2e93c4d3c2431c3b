"""A resharded checkpoint holds the same bits, is cut as the layout cuts, or does not come about."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_lite.checkpoint import reshard as resharding
from megatron_lite.checkpoint import store, tensor_file
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fingerprint import Fingerprints
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.reshard import Target, plan, reshard
from megatron_lite.checkpoint.scan import scan, uncovered
from tests.checkpoints import Made, Shape, assert_equal, make, read

LAYOUTS = list(product((1, 2, 4), (1, 2, 4)))


def run(made: Made, root: Path, target: Target) -> tuple[Path, Fingerprints]:
    return reshard(made.folder, root, plan(made.manifest, target), workers=2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_there_and_back(tp: int, pp: int, tied: bool, tmp_path: Path) -> None:
    made = make(tmp_path / "a", Shape(tied=tied), tp=2, pp=2)
    there, first = run(made, tmp_path / "b", Target(tp=tp, pp=pp))
    assert there == tmp_path / "b/global_step7"
    assert_equal(read(there), made.arrays)
    manifest = Manifest.read(there)
    assert manifest.layout == {"tp": tp, "dp": 1, "pp": pp}
    assert len(manifest.files) == tp * pp, "a file a rank"
    assert manifest.progress == made.manifest.progress
    assert manifest.scalars == made.manifest.scalars
    assert uncovered(manifest) == []
    parallel = json.loads((there / "config.json").read_text())["parallel"]
    assert parallel["tensor_model_parallel_size"] == tp
    back, second = run(Made(there.parent, there), tmp_path / "c", Target(tp=2, pp=2))
    assert first.lines() == second.lines()
    files = Manifest.read(back).files
    again, _ = run(made, tmp_path / "d", Target(tp=2, pp=2))
    assert files == Manifest.read(again).files, "the way there leaves no trace"
    assert (tmp_path / "b/latest").read_text() == "global_step7\n"
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"latest", "global_step7"}


@given(
    layers=st.integers(1, 6),
    heads=st.sampled_from([(4, 1), (4, 2), (8, 8)]),
    spare=st.integers(0, 60),
    layouts=st.tuples(*[st.tuples(st.sampled_from((1, 2, 4)), st.integers(1, 4))] * 2),
    stretch=st.sampled_from([64, 256, 1 << 20]),
)
@settings(max_examples=40, deadline=None)
def test_any_model_from_any_layout_to_any(
    layers: int,
    heads: tuple[int, int],
    spare: int,
    layouts: tuple[tuple[int, int], tuple[int, int]],
    stretch: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Padding that fills whole ranks included; a stretch is a row or a few."""
    root = tmp_path_factory.mktemp("any")
    shape = Shape(
        layers=layers, heads=heads[0], groups=heads[1], vocabulary=100 - spare, padded=100
    )
    (tp, pp), (new_tp, new_pp) = layouts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "STRETCH_BYTES", stretch)
        made = make(root / "a", shape, tp=tp, pp=min(pp, layers))
        folder, _ = run(made, root / "b", Target(tp=new_tp, pp=min(new_pp, layers)))
    assert_equal(read(folder), made.arrays)
    shutil.rmtree(root)


def test_stages_of_given_sizes(tmp_path: Path) -> None:
    made = make(tmp_path / "a")
    folder, _ = run(made, tmp_path / "b", Target(tp=1, pp=2, layers=(1, 3)))
    held = {b.tensor for b in Manifest.read(folder).boxes if b.file == "shard_00000.safetensors"}
    assert {name.split(".")[1] for name in held if name.startswith("layers")} == {"0"}
    with pytest.raises(CheckpointError, match="has 5 layers, but the model has 4"):
        plan(made.manifest, Target(tp=1, pp=2, layers=(1, 4)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_alone(dtype: str, tmp_path: Path) -> None:
    made = make(tmp_path / "a", tp=2)
    target = Target(tp=1, pp=2, weights_only=True, dtype=dtype)
    folder, proof = run(made, tmp_path / "b", target)
    manifest = Manifest.read(folder)
    assert manifest.states == ("weight",) and manifest.dtype == dtype
    assert len(proof.sums) == len(manifest.tensors)
    tensors = {
        key: values for name in manifest.files for key, values in load_file(folder / name).items()
    }
    for stored in manifest.boxes:
        whole = torch.from_numpy(made.arrays[stored.tensor, "fp32"])
        expected = whole[stored.box.slices()].to(getattr(torch, dtype))
        assert torch.equal(tensors[stored.key], expected)
    drops = plan(made.manifest, target).dropped
    assert any("exp_avg_sq" in line for line in drops) and any("rng_00001" in d for d in drops)
    again = Target(tp=2, pp=1, weights_only=True, dtype="float32")
    wide, _ = run(Made(folder.parent, folder), tmp_path / "c", again)
    for (name, _), values in read(wide).items():
        rounded = torch.from_numpy(made.arrays[name, "fp32"]).to(getattr(torch, dtype))
        np.testing.assert_array_equal(values, rounded.float().numpy())


def test_what_can_not_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    manifest = make(tmp_path / "a").manifest
    for target, told in [
        (Target(tp=5, pp=1), "tensor 5 x pipeline 1: .* can't be cut into 5"),
        (Target(tp=1, pp=5), "4 layers cannot be balanced over 5"),
        (Target(tp=1, pp=1, dtype="bfloat16"), "is for weights alone"),
    ]:
        with pytest.raises(CheckpointError, match=told):
            plan(manifest, target)


def test_a_step_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    made = make(tmp_path / "a")
    before = (made.folder / "manifest.json").read_bytes()
    (tmp_path / "same").symlink_to(tmp_path / "a")
    for root in (tmp_path / "a", tmp_path / "same"):
        with pytest.raises(CheckpointError, match="global_step7 is the source; write"):
            run(made, root, Target(tp=2, pp=1))
    with pytest.raises(CheckpointError, match="global_step7 exists; remove it first, or write"):
        run(make(tmp_path / "b"), tmp_path / "a", Target(tp=2, pp=1))
    assert (made.folder / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("proof", [True, False])
@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        ("shard_00001.safetensors", "flip", "its bytes have changed"),
        ("shard_00001.safetensors", "cut", "its tensors end at"),
        ("shard_00002.safetensors", "remove", "missing"),
    ],
)
def test_a_damaged_source_is_refused_by_name(
    file: str, damage: str, told: str, proof: bool, tmp_path: Path
) -> None:
    """Also one without fingerprints from when it was saved, which is read whole beforehand."""
    made = make(tmp_path / "a", tp=2, pp=2, proof=proof)
    path = made.folder / file
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(raw if damage == "flip" else raw[:-4])
    with pytest.raises(CheckpointError, match=told) as error:
        run(made, tmp_path / "b", Target(tp=1, pp=1))
    assert str(path) in str(error.value)
    assert store.find(tmp_path / "b", step=None) is None


def test_a_gap_and_an_overlap_are_told(tmp_path: Path) -> None:
    made = make(tmp_path / "a", tp=2)
    first, *others = made.manifest.boxes
    lost, twice = (replace(made.manifest, boxes=b) for b in (others, [first, first, *others]))
    assert any("the boxes hold" in line for line in uncovered(lost))
    assert any("boxes overlap" in line for line in uncovered(twice))
    aside = replace(first, box=replace(first.box, offset=(1, *first.box.offset[1:])))
    shifted = replace(made.manifest, boxes=[aside, *others])
    assert any("overlap" in line or "the boxes hold" in line for line in uncovered(shifted))


def test_few_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lite.checkpoint.tensor_file._OPEN_FILES", 2)
    made = make(tmp_path / "a", tp=4, pp=4)
    before, most = len(os.listdir("/proc/self/fd")), 0

    def look(count: int) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) - before)

    planned = plan(made.manifest, Target(tp=1, pp=1))
    folder, _ = reshard(made.folder, tmp_path / "b", planned, progress=look)
    assert_equal(read(folder), made.arrays)
    assert most <= 2 + 3, "two to read from, one to write, and what lists them"


def test_a_kill_before_the_name_keeps_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(store, "commit", lambda *args, **kwargs: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(made, tmp_path / "b", Target(tp=2, pp=2))
    monkeypatch.setattr(resharding, "_write_shard", None)
    folder, _ = run(made, tmp_path / "b", Target(tp=2, pp=2))
    assert_equal(read(folder), made.arrays)


def test_a_layout_that_attention_refuses(tmp_path: Path) -> None:
    manifest = make(tmp_path / "a").manifest
    heads = {"num_layers": 4, "num_attention_heads": 8, "num_query_groups": 4}
    with pytest.raises(CheckpointError, match="num_query_groups 4 can't be divided by 8"):
        plan(replace(manifest, model=heads), Target(tp=8, pp=1))


class Killed(BaseException):
    """Ends the program in the middle, as far as files can tell."""


def test_a_killed_run_goes_on_with_the_shards_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "a")
    planned = plan(made.manifest, Target(tp=2, pp=2))
    written: list[str] = []
    whole = resharding._write_shard

    def stops(path: Path, *args: object) -> None:
        if len(written) == 2:
            path.with_suffix(".part").write_bytes(b"half")
            raise Killed
        written.append(path.name)
        whole(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(resharding, "_write_shard", stops)
    with pytest.raises(Killed):
        reshard(made.folder, tmp_path / "b", planned)
    unfinished = store.unfinished(tmp_path / "b", 7)
    assert store.find(tmp_path / "b", step=None) is None
    times = {name: (unfinished / name).stat().st_mtime_ns for name in written}
    written.clear()
    monkeypatch.setattr(
        resharding, "_write_shard", lambda path, *a: (written.append(path.name), whole(path, *a))
    )
    folder, _ = reshard(made.folder, tmp_path / "b", planned)
    assert len(written) == 2 and not set(written) & times.keys()
    assert {name: (folder / name).stat().st_mtime_ns for name in times} == times
    assert_equal(read(folder), made.arrays)
    assert not list(folder.glob("*.part")) and not (folder / store.RESUMABLE).exists()


def test_rests_of_another_job_are_not_used(tmp_path: Path) -> None:
    """Not of another layout, and not of another source with the same step."""
    made, other = make(tmp_path / "a"), make(tmp_path / "o", seed=5)
    for job in ("another job", None):
        rests = store.unfinished(tmp_path / "b", 7)
        rests.mkdir(parents=True)
        shutil.copy(other.folder / "shard_00000.safetensors", rests)
        if job is not None:
            (rests / store.RESUMABLE).write_text(job)
        folder, _ = run(made, tmp_path / "b", Target(tp=1, pp=1))
        assert_equal(read(folder), made.arrays)
        shutil.rmtree(tmp_path / "b")


def test_a_wrong_result_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof does not trust the writing: here one number gets another sign."""
    made = make(tmp_path / "a")
    assemble = resharding.assemble

    def spoilt(*args: object) -> object:
        for part, values in assemble(*args):  # type: ignore[arg-type]
            if args[2] == "layers.2.mlp.down.weight" and args[3] == "exp_avg":
                values.flat[3] *= -1
            yield part, values

    monkeypatch.setattr(resharding, "assemble", spoilt)
    with pytest.raises(CheckpointError, match=r"layers.2.mlp.down.weight \(exp_avg\)") as error:
        run(made, tmp_path / "b", Target(tp=2, pp=1))
    assert "fp32" not in str(error.value)
    assert store.find(tmp_path / "b", step=None) is None


def test_no_space_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path / "a")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"\d MB are needed, 0.0 MB are free"):
        run(made, tmp_path / "b", Target(tp=2, pp=1))
    assert made.root.is_dir() and store.find(tmp_path / "b", step=None) is None


def test_a_scan_sees_files_that_the_manifest_does_not_know(tmp_path: Path) -> None:
    made = make(tmp_path / "a")
    manifest = made.manifest
    assert scan(made.folder, manifest.boxes, files=manifest.files).faults == []
    some = manifest.boxes[:-1]
    (fault,) = scan(made.folder, some, files=manifest.files).faults
    assert "is not what the manifest says" in fault
    files = {k: v for k, v in manifest.files.items() if not k.startswith("shard")}
    (fault,) = scan(made.folder, manifest.boxes, files=files).faults
    assert "is not in the manifest's list" in fault
