"""Megatron-LM's legacy folders, of several styles and layouts, against known logical tensors."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.checkpoints import fingerprints, read
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
    assert manifest.fingerprints == fingerprints(arrays)
    assert manifest.tensors == target.table and manifest.states == (WEIGHT,)
    assert manifest.step == 20 and manifest.progress["consumed_samples"] == 160
    assert {name for name, _ in arrays} == values.keys()
    for tensor, expected in values.items():
        np.testing.assert_array_equal(arrays[tensor, WEIGHT], expected.numpy(), tensor)


def test_rope_on_neighbours_is_reordered() -> None:
    """Scores of the original pairing, computed here, and of ours on the reordered tensors.

    With a gain of each channel on the heads, as after a norm of query and key.
    """
    model = ModelConfig.model_construct(kv_channels=12, rotary_percent=2 / 3)
    d, r, heads, length = 12, 8, 2, 6
    pairs = [(torch.randn(heads * d, 5), torch.rand(d) + 0.5) for _ in range(2)]
    x = torch.randn(1, length, 5)
    cos, sin = rotary_tables(length, r, base=100.0, device=torch.device("cpu"))

    def heads_of(weight: Tensor, gain: Tensor) -> Tensor:
        return (x @ weight.t()).view(1, length, heads, d) * gain

    def neighbours(weight: Tensor, gain: Tensor) -> Tensor:
        out = heads_of(weight, gain)
        even, odd = out[..., 0:r:2].clone(), out[..., 1:r:2].clone()
        out[..., 0:r:2] = even * cos[:, None] - odd * sin[:, None]
        out[..., 1:r:2] = odd * cos[:, None] + even * sin[:, None]
        return out

    def ours(weight: Tensor, gain: Tensor) -> Tensor:
        halves = (megatron_layout.halves(tensor, model) for tensor in (weight, gain))
        return apply_rotary(heads_of(*halves), cos, sin)

    expected, found = (
        torch.einsum("bqhd,bkhd->bhqk", *(turn(*pair) for pair in pairs))
        for turn in (neighbours, ours)
    )
    torch.testing.assert_close(found, expected)
    without = torch.einsum(
        "bqhd,bkhd->bhqk", *(apply_rotary(heads_of(*pair), cos, sin) for pair in pairs)
    )
    assert (without - expected).abs().max() > 0.1


def test_all_that_rope_turns_is_reordered(tmp_path: Path) -> None:
    """Rows of query and key, and the gains of their norms, of a run with RoPE on neighbours."""
    section, layout = LLAMA | {"qk_layernorm": True}, Layout("local", 2)
    target, values = made(tmp_path, section, layout, rotary_interleaved=True)
    found = megatron.read(tmp_path / "theirs", target)
    moved = {"query", "key", "query_norm", "key_norm"}
    assert moved < {name.split(".")[-2] for name in values}
    for tensor, expected in values.items():
        if tensor.split(".")[-2] in moved:
            expected = megatron_layout.halves(expected, target.model)
        torch.testing.assert_close(found.read(tensor, WEIGHT), expected, rtol=0, atol=0)


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    target, _ = made(
        tmp_path,
        LLAMA,
        Layout("local"),
        num_query_groups=2,
        rotary_base=7,
        num_experts=8,
        padded_vocab_size=128,
        add_qkv_bias=True,
        no_rope_freq=4,
        qk_l2_norm=True,
        softmax_type="off-by-one",
    )
    said = refused(tmp_path, target)
    for part in (
        "num_query_groups is 2 in the checkpoint, model.num_query_groups is 4",
        "rotary_base is 7 in the checkpoint, model.rotary_base is 10000.0",
        "num_experts is 8: not supported",
        "padded_vocab_size is 128 in the checkpoint, 96 for 90 token ids",
        "add_bias_linear or add_qkv_bias is True in the checkpoint, model.add_qkv_bias is False",
        "no_rope_freq is 4: not supported",
        "qk_l2_norm is True: not supported",
        "softmax_type is off-by-one: not supported",
    ):
        assert part in said


def test_plain_softmax_is_taken(tmp_path: Path) -> None:
    target, _ = made(tmp_path, LLAMA, Layout("local"), softmax_type="vanilla", no_rope_freq=None)
    megatron.read(tmp_path / "theirs", target)


def change(folder: Path, rank: str, work: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "theirs" / "iter_0000020" / rank / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    work(content)
    torch.save(content, path)


def test_a_head_of_its_own_is_no_tied_one(tmp_path: Path) -> None:
    """Where no arguments are kept: on one stage, and on the last of two as one changed number."""
    _, values = made(tmp_path, LLAMA, Layout("local"))
    change(tmp_path, "mp_rank_00", lambda content: content.pop("args"))
    tied = Target.read(write_config(tmp_path / "tied.json", tmp_path / "none", TIED_LLAMA))
    expected = "output_layer.weight is no copy of embedding.word_embeddings.weight"
    assert f"mp_rank_00: {expected}" in refused(tmp_path, tied)

    cut = tmp_path / "cut"
    write(cut / "theirs", values, tied.model, Layout("local", 2, 2))
    megatron.read(cut / "theirs", tied)
    change(
        cut, "mp_rank_01_001", lambda content: content["model"]["output_layer.weight"][3].add_(1)
    )
    said = refused(cut, tied)
    assert f"mp_rank_01_001: {expected}" in said and "mp_rank_00_001" not in said


def test_groups_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    made(tmp_path, LLAMA, Layout("local", 4))
    odd = LLAMA | {"num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 8}
    config = write_config(tmp_path / "odd.json", tmp_path / "none", odd)
    for rank in range(4):
        change(tmp_path, f"mp_rank_{rank:02d}", lambda content: content.pop("args"))
    said = refused(tmp_path, Target.read(config))
    assert "its 4 tensor ranks can't share model.num_query_groups 3 evenly" in said


def test_every_faulty_tensor_is_named(tmp_path: Path) -> None:
    target, _ = made(tmp_path, LLAMA, Layout("local", 2))

    def damage(content: dict[str, Any]) -> None:
        layers = content["model"]
        del layers["decoder.layers.1.mlp.linear_fc2.weight"]
        layers["decoder.layers.2.mlp.router.weight"] = torch.ones(3)

    def reshape(content: dict[str, Any]) -> None:
        content["model"]["decoder.layers.3.mlp.linear_fc1.weight"] = torch.ones(4, 64)

    for rank in ("mp_rank_00", "mp_rank_01"):
        change(tmp_path, rank, damage)
    change(tmp_path, "mp_rank_01", reshape)
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
    (tmp_path / "theirs" / megatron.POINTER).write_bytes(b"\xff")
    assert f"{megatron.POINTER}: damaged" in refused(tmp_path, target)
    with pytest.raises(CheckpointError, match=r"iter_0000099: no such folder; there: iter_0000020"):
        megatron.read(tmp_path / "theirs", target, step=99)
