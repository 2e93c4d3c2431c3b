"""What is refused of DeepSpeed's folders, and how; test_convert_deepspeed.py has the real ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import STATES
from megatron_lite.convert import foreign, universal, zero
from megatron_lite.convert.hugging_face import parameter_shapes, parts_of
from megatron_lite.convert.target import Target
from tests.checkpoints import read
from tests.distributed.models import LLAMA, write_config

MODEL = "mp_rank_00_model_states.pt"
RANKS = 2
Change = Callable[[dict[str, Any]], None]


def optimizer_file(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.fixture
def target(tmp_path: Path) -> Target:
    section = LLAMA | {"num_layers": 1}
    return Target.read(write_config(tmp_path / "run.json", tmp_path / "none", section))


@pytest.fixture
def folder(tmp_path: Path, target: Target) -> Path:
    """A checkpoint of two ranks, each with half of the numbers, which count up from 0."""
    shapes = parameter_shapes(parts_of(target.model, target.table), target.table)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    half = -(-total // RANKS)
    folder = tmp_path / "theirs" / "global_step7"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step7")
    model = {
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items())],
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "global_steps": 7,
        "global_samples": 28,
        "skipped_steps": 1,
    }
    torch.save(model, folder / MODEL)
    for rank in range(RANKS):
        slices, at = OrderedDict(), 0
        for name, shape in shapes.items():
            low = max(at, rank * half)
            high = min(at + torch.Size(shape).numel(), (rank + 1) * half)
            if low < high:
                slices[name] = fragment_address(start=low - rank * half, numel=high - low)
            at += torch.Size(shape).numel()
        flat = torch.arange(rank * half, (rank + 1) * half, dtype=torch.float32)
        moments = {"step": torch.tensor(6.0), "exp_avg": flat + 0.25, "exp_avg_sq": flat + 0.5}
        optimizer = {
            "base_optimizer_state": {"state": {0: moments}, "param_groups": [{"params": [0]}]},
            "single_partition_of_fp32_groups": [flat],
            "param_slice_mappings": [slices],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / optimizer_file(rank))
    return folder


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
    with pytest.raises(CheckpointError, match="global_step7 exists; remove it first"):
        foreign.write(tmp_path / "ours", target, found)
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == ["global_step7", "latest"]


def test_export_writes_all_or_nothing(
    tmp_path: Path, folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = foreign.write(tmp_path / "ours", target, zero.read(folder.parent, target))
    written = universal.export(ours, tmp_path / "there")
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


def test_fragments_that_do_not_make_a_tensor(folder: Path, target: Target) -> None:
    def damage(content: dict[str, Any]) -> None:
        del content["optimizer_state_dict"]["param_slice_mappings"][0]["lm_head.weight"]

    change(folder / optimizer_file(1), damage)
    assert "lm_head.weight: the ranks' files hold" in refused(folder, target)


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
