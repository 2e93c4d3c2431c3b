"""What is refused of DeepSpeed's folders, and how; test_convert_deepspeed.py has the real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.convert import foreign, universal, zero
from megatron_lite.convert.target import Target
from tests.checkpoints import fingerprints, read
from tests.distributed.models import LLAMA, write_config
from tests.zero_checkpoints import MODEL, optimizer_file, write

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    section = LLAMA | {"num_layers": 1}
    return Target.read(write_config(tmp_path / "run.json", tmp_path / "none", section))


@pytest.fixture
def folder(tmp_path: Path, target: Target) -> Path:
    """A checkpoint of two ranks."""
    return write(tmp_path / "theirs", target)


def change(path: Path, work: Change) -> None:
    content = torch.load(path, weights_only=False)
    work(content)
    torch.save(content, path)


def refused(folder: Path, target: Target) -> str:
    with pytest.raises(CheckpointError) as caught:
        zero.read(folder.parent, target)
    return str(caught.value)


def test_what_is_written(tmp_path: Path, folder: Path, target: Target) -> None:
    found = zero.read(folder.parent, target)
    assert (found.position.updates, found.position.skipped) == (6, 1)
    assert found.scalars["optimizer_step"] == 6
    arrays = read(foreign.write(tmp_path / "ours", target, found))
    assert arrays.keys() == {(name, state) for name in target.table for state in STATES}
    table = arrays["embedding.word_embeddings.weight", "exp_avg"].ravel()
    assert len(set((table - 0.25).tolist())) == table.size
    proof = Manifest.read(tmp_path / "ours" / "global_step7").fingerprints
    assert proof == fingerprints(arrays)
    with pytest.raises(CheckpointError, match="global_step7 exists; remove it first"):
        foreign.write(tmp_path / "ours", target, found)
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == ["global_step7", "latest"]


def test_export_writes_all_or_nothing(
    tmp_path: Path, folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = foreign.write(tmp_path / "ours", target, zero.read(folder.parent, target))
    killed = tmp_path / "there" / ".global_step7_universal.tmp" / "zero" / "model.norm.weight"
    killed.mkdir(parents=True)
    written = universal.export(ours, tmp_path / "there")
    assert not list((tmp_path / "there").glob(".*"))
    assert (tmp_path / "there" / "latest_universal").read_text() == "global_step7_universal"
    one = torch.load(written / "zero" / "model.norm.weight" / "exp_avg.pt", weights_only=True)
    name = "final_norm.weight"
    expected = torch.from_numpy(read(ours)[name, "exp_avg"])
    torch.testing.assert_close(one["param"], expected, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="global_step7_universal exists; remove it first"):
        universal.export(ours, tmp_path / "there")

    def full(value: Any, file: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        universal.export(ours, tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, folder: Path, target: Target) -> None:
    ours = foreign.write(tmp_path / "ours", target, zero.read(folder.parent, target))
    (shard,) = ours.glob("*.safetensors")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{ours} is damaged:\n  {shard}: checksum"):
        universal.export(ours, tmp_path / "there")
    shard.write_bytes(whole)
    config = ours / "config.json"
    config.write_text(config.read_text().replace('"seed"', '"sead"'))
    with pytest.raises(CheckpointError, match=r"of this version[^\n]+\n  training\.sead: "):
        universal.export(ours, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_an_export_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the folder is synced, the pointer too, before each is renamed."""
    ours = foreign.write(tmp_path / "ours", target, zero.read(folder.parent, target))
    synced: set[Path] = set()
    renamed = []
    sync, rename = store.sync, Path.rename

    def watched(path: Path, to: Path) -> Path:
        for inner in (*path.rglob("*"), path):
            assert inner in synced, f"{inner} is not on the disk"
        renamed.append(to.name)
        return rename(path, to)

    monkeypatch.setattr(store, "sync", lambda path: (synced.add(path), sync(path)))
    monkeypatch.setattr(Path, "rename", watched)
    universal.export(ours, tmp_path / "there")
    assert renamed == ["global_step7_universal", "latest_universal"]
    assert tmp_path / "there" in synced


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, folder: Path, target: Target) -> None:
    found = zero.read(folder.parent, target)
    short = replace(found, read=lambda tensor, state: found.read(tensor, state)[:1])
    with pytest.raises(CheckpointError, match=r"embedding\.word_embeddings\.weight \(fp32\) has"):
        foreign.write(tmp_path / "ours", target, short)
    assert list((tmp_path / "ours").iterdir()) == []


def test_missing_files_are_all_named(folder: Path, target: Target) -> None:
    (folder / optimizer_file(1)).unlink()
    assert optimizer_file(1) in refused(folder, target)
    (folder / MODEL).unlink()
    assert f"{MODEL}: missing" in refused(folder, target)
    (folder.parent / "latest").write_text("global_step8")
    assert "global_step8: no such folder; there: global_step7" in refused(folder, target)
    (folder.parent / "latest").write_bytes(b"\xff\xfe")
    assert "latest: damaged" in refused(folder, target)


def test_a_folder_that_holds_nothing_of_deepspeed_is_told(
    tmp_path: Path, folder: Path, target: Target
) -> None:
    foreign.write(tmp_path / "ours", target, zero.read(folder.parent, target))
    with pytest.raises(CheckpointError, match="global_step7: is a checkpoint of ours"):
        zero.read(tmp_path / "ours", target)
    with pytest.raises(CheckpointError, match=f"^{tmp_path / 'nothing'}: no such folder$"):
        zero.read(tmp_path / "nothing", target)


def test_every_differing_tensor_is_named(folder: Path, target: Target) -> None:
    def damage(content: dict[str, Any]) -> None:
        shapes = content["param_shapes"][0]
        del shapes["model.norm.weight"]
        shapes["model.layers.0.mlp.gate_proj.bias"] = torch.Size([96])
        shapes["lm_head.weight"] = torch.Size([91, 64])

    change(folder / MODEL, damage)
    said = refused(folder, target)
    assert "model.norm.weight: missing, the config's model has it with shape (64,)" in said
    assert "mlp.gate_proj.bias: superfluous" in said
    assert "lm_head.weight: shape (91, 64), the config's model has (90, 64)" in said


def moved(content: dict[str, Any]) -> None:
    slices = content["optimizer_state_dict"]["param_slice_mappings"][0]
    slices[list(slices)[1]].start = 0


def left_out(content: dict[str, Any]) -> None:
    del content["optimizer_state_dict"]["param_slice_mappings"][0]["lm_head.weight"]


@pytest.mark.parametrize("work", [moved, left_out])
def test_slices_in_another_order_than_the_parameters(
    folder: Path, target: Target, work: Change
) -> None:
    change(folder / optimizer_file(1), work)
    said = refused(folder, target)
    assert "round_robin_gradients" in said and "load_optimizer_states=False" in said
    assert f"{optimizer_file(1)}: " in said and "(start, count) is" in said


def short_master(content: dict[str, Any]) -> None:
    flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flat[0] = flat[0][:-5].clone()


def short_moment(content: dict[str, Any]) -> None:
    moments = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    moments["exp_avg"] = moments["exp_avg"][:-5].clone()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (short_master, "group 0: the ranks' files hold"),
        (short_moment, f"{optimizer_file(1)}: exp_avg of group 0 is too short"),
    ],
)
def test_numbers_are_missing(folder: Path, target: Target, work: Change, said: str) -> None:
    change(folder / optimizer_file(1), work)
    assert said in refused(folder, target)


def test_files_of_two_precisions(folder: Path, target: Target) -> None:
    names = [optimizer_file(0), f"bf16_{optimizer_file(0)}"]
    (folder / names[1]).write_bytes((folder / names[0]).read_bytes())
    assert f"holds both {' and '.join(names)}" in refused(folder, target)


def test_values_of_another_kind(tmp_path: Path, folder: Path, target: Target) -> None:
    """Told when they are read, which is while ours is written; nothing of that stays."""

    def damage(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["exp_avg"] = state["exp_avg"].view(-1, 1).expand(-1, 2)

    change(folder / optimizer_file(0), damage)
    found = zero.read(folder.parent, target)
    with pytest.raises(CheckpointError, match="is not laid out as DeepSpeed lays out ZeRO 1 and 2"):
        foreign.write(tmp_path / "ours", target, found)
    assert list((tmp_path / "ours").iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("param_slice_mappings", None, "not of ZeRO stage 1 or 2"),
        ("base_optimizer_state", [], "elastic_checkpoint"),
        ("param_alignment_paddings", [[0, 3]], "parameter_alignment"),
        ("base_optimizer_state", {"state": {}, "param_groups": [{}]}, "only Adam's states"),
        ("base_optimizer_state", {"state": 5}, "is not laid out as DeepSpeed"),
    ],
)
def test_other_kinds_are_refused(
    folder: Path, target: Target, key: str, value: Any, said: str
) -> None:
    def damage(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"][key] = value
        if value is None:
            del content["optimizer_state_dict"][key]

    change(folder / optimizer_file(0), damage)
    assert said in refused(folder, target)


def test_a_model_that_hugging_face_does_not_have(tmp_path: Path, folder: Path) -> None:
    sections = LLAMA | {"num_layers": 1}
    odd = write_config(tmp_path / "odd.json", tmp_path, sections | {"normalization": "LayerNorm"})
    assert "is neither LlamaForCausalLM" in refused(folder, Target.read(odd))
    norms = write_config(tmp_path / "norms.json", tmp_path, sections | {"qk_layernorm": True})
    said = refused(folder, Target.read(norms))
    assert "LlamaForCausalLM has no place for layers.0.attention.key_norm.weight" in said
