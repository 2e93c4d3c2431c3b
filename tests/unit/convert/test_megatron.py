"""Megatron-LM's legacy folders, of several styles and layouts, against known logical tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import WEIGHT, Manifest
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import foreign, megatron, megatron_layout
from megatron_lite.convert.target import Target
from megatron_lite.layers.rotary import apply_rotary, rotary_tables
from tests.checkpoints import read
from tests.distributed.models import GPT, LLAMA, write_config
from tests.megatron_checkpoints import Layout, write

TIED_LLAMA = LLAMA | {"untie_embeddings_and_output_weights": False}
CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    "gpt, legacy": (GPT, Layout("legacy")),
    "gpt, mcore, tensor 2 x pipeline 2": (GPT, Layout("local", 2, 2)),
    "tied llama, legacy, tensor 2 x pipeline 2": (TIED_LLAMA, Layout("legacy", 2, 2)),
    "llama, mcore, tensor 2": (LLAMA, Layout("local", 2, 1)),
    "llama, Transformer Engine, pipeline 2": (LLAMA, Layout("te", 1, 2)),
}


def made(
    folder: Path, section: dict[str, Any], layout: Layout, **arguments: Any
) -> tuple[Target, dict[str, Tensor]]:
    """A target and random values of its tensors, which `folder`/theirs holds."""
    target = Target.read(write_config(folder / "run.json", folder / "none", section))
    generator = torch.Generator().manual_seed(2)
    values = {n: torch.randn(t.shape, generator=generator) for n, t in target.table.items()}
    write(folder / "theirs", values, target.model, layout, **arguments)
    return target, values


def refused(folder: Path, target: Target) -> str:
    with pytest.raises(CheckpointError) as caught:
        megatron.read(folder / "theirs", target)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_weights(tmp_path: Path, name: str) -> None:
    section, layout = CASES[name]
    target, values = made(tmp_path, section, layout)
    found = foreign.write(tmp_path / "ours", target, megatron.read(tmp_path / "theirs", target))

    manifest, arrays = Manifest.read(found), read(found)
    assert manifest.tensors == target.table and manifest.states == (WEIGHT,)
    assert manifest.step == 20 and manifest.progress["consumed_samples"] == 160
    assert {name for name, _ in arrays} == values.keys()
    for tensor, expected in values.items():
        np.testing.assert_array_equal(arrays[tensor, WEIGHT], expected.numpy(), tensor)


def test_rope_on_neighbours_is_reordered() -> None:
    """Scores of the original pairing, computed here, and of ours on the reordered rows."""
    model = ModelConfig.model_construct(kv_channels=12, rotary_percent=2 / 3)
    d, r, heads, length = 12, 8, 2, 6
    weights = [torch.randn(heads * d, 5) for _ in range(2)]
    x = torch.randn(1, length, 5)
    cos, sin = rotary_tables(length, r, base=100.0, device=torch.device("cpu"))

    def neighbours(weight: Tensor) -> Tensor:
        out = (x @ weight.t()).view(1, length, heads, d).clone()
        even, odd = out[..., 0:r:2].clone(), out[..., 1:r:2].clone()
        out[..., 0:r:2] = even * cos[:, None] - odd * sin[:, None]
        out[..., 1:r:2] = odd * cos[:, None] + even * sin[:, None]
        return out

    def ours(weight: Tensor) -> Tensor:
        rows = (x @ megatron_layout.halves(weight, model).t()).view(1, length, heads, d)
        return apply_rotary(rows, cos, sin)

    expected, found = (
        torch.einsum("bqhd,bkhd->bhqk", *map(turn, weights)) for turn in (neighbours, ours)
    )
    torch.testing.assert_close(found, expected)
    without = torch.einsum(
        "bqhd,bkhd->bhqk",
        *(apply_rotary((x @ w.t()).view(1, length, heads, d), cos, sin) for w in weights),
    )
    assert (without - expected).abs().max() > 0.1


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    target, _ = made(
        tmp_path,
        LLAMA,
        Layout("local"),
        num_query_groups=2,
        rotary_base=7,
        num_experts=8,
        padded_vocab_size=128,
    )
    said = refused(tmp_path, target)
    for part in (
        "num_query_groups is 2 in the checkpoint, model.num_query_groups is 4",
        "rotary_base is 7 in the checkpoint, model.rotary_base is 10000.0",
        "num_experts is 8: not supported",
        "padded_vocab_size is 128 in the checkpoint, 96 for 90 token ids",
    ):
        assert part in said


def test_every_faulty_tensor_is_named(tmp_path: Path) -> None:
    target, _ = made(tmp_path, LLAMA, Layout("local", 2))
    for rank in ("mp_rank_00", "mp_rank_01"):
        path = tmp_path / "theirs" / "iter_0000020" / rank / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        layers = content["model"]
        del layers["decoder.layers.1.mlp.linear_fc2.weight"]
        layers["decoder.layers.2.mlp.router.weight"] = torch.ones(3)
        if rank == "mp_rank_01":
            layers["decoder.layers.3.mlp.linear_fc1.weight"] = torch.ones(4, 64)
        torch.save(content, path)
    said = refused(tmp_path, target)
    assert "layers.1.mlp.down.weight: missing" in said
    assert "decoder.layers.2.mlp.router.weight is superfluous" in said
    assert (
        "mp_rank_01: decoder.layers.3.mlp.linear_fc1.weight has shape [4, 64], not [96, 64]" in said
    )


def test_missing_files_and_other_formats(tmp_path: Path) -> None:
    target, _ = made(tmp_path, LLAMA, Layout("local", 2, 2))
    folder = tmp_path / "theirs" / "iter_0000020"
    (folder / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    assert "mp_rank_01_001/model_optim_rng.pt" in refused(tmp_path, target)
    path = folder / "mp_rank_00_000" / "model_optim_rng.pt"
    torch.save({"checkpoint_version": 2.0, "model": {}}, path)
    torch.save({"model0": {}}, folder / "mp_rank_01_001" / "model_optim_rng.pt")
    assert "checkpoint_version is 2.0" in refused(tmp_path, target)
    with pytest.raises(CheckpointError, match=r"iter_0000099: no such folder; there: iter_0000020"):
        megatron.read(tmp_path / "theirs", target, step=99)
