"""Legacy checkpoint folders as Megatron-LM writes them, made by hand from logical tensors.

Head by head and rank by rank, after Megatron-LM's documentation of its layouts; shares no code with
megatron_lite.convert.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.schema import ModelConfig

LEGACY = {
    "norm": ("input_norm", "post_attention_norm"),
    "qkv": "self_attention.query_key_value",
    "output": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
LOCAL = {
    "norm": ("input_layernorm", "pre_mlp_layernorm"),
    "qkv": "self_attention.linear_qkv",
    "output": "self_attention.linear_proj",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}
"""mcore's local specification; with Transformer Engine the norms are in the linear layers."""


@dataclass(frozen=True)
class Layout:
    """How a folder is written."""

    style: str = "legacy"
    """legacy, local or te."""
    tp: int = 1
    pp: int = 1
    iteration: int = 20


def write(
    root: Path, values: Mapping[str, Tensor], model: ModelConfig, layout: Layout, **arguments: Any
) -> Path:
    """Write `<root>/iter_…` and the pointer file; `arguments` replace Megatron's."""
    vocabulary = values["embedding.word_embeddings.weight"].shape[0]
    multiple = 16 * layout.tp
    padded = -(-vocabulary // multiple) * multiple
    args = _arguments(model, layout, padded) | arguments
    folder = root / f"iter_{layout.iteration:07d}"
    for p in range(layout.pp):
        for t in range(layout.tp):
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if layout.pp > 1 else "")
            (folder / name).mkdir(parents=True)
            content = {
                "args": Namespace(**args),
                "checkpoint_version": 3.0,
                "iteration": layout.iteration,
                "model": _rank(values, model, layout, padded, t, p),
            }
            torch.save(content, folder / name / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(f"{layout.iteration}")
    return folder


def _arguments(model: ModelConfig, layout: Layout, padded: int) -> dict[str, Any]:
    same = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization "
        "swiglu add_bias_linear untie_embeddings_and_output_weights position_embedding_type "
        "norm_epsilon"
    )
    return {name: getattr(model, name) for name in same.split()} | {
        "add_qkv_bias": False,  # of models whose other linear layers have none
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "rotary_base": int(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": 16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "consumed_train_samples": 160,
        "params_dtype": torch.float32,
    }


def _rank(
    values: Mapping[str, Tensor], model: ModelConfig, layout: Layout, padded: int, t: int, p: int
) -> dict[str, Any]:
    """The `model` entry of one rank's file."""

    def vocabulary(name: str) -> Tensor:
        table = values[name]
        fill = torch.full((padded - len(table), table.shape[1]), 7.0)
        return torch.cat([table, fill]).chunk(layout.tp)[t]

    tied = not model.untie_embeddings_and_output_weights
    first, last = p == 0, p == layout.pp - 1
    flat: dict[str, Any] = {}
    if first:
        flat["embedding.word_embeddings.weight"] = vocabulary("embedding.word_embeddings.weight")
        if "embedding.position_embeddings.weight" in values:
            name = "embedding.position_embeddings.weight"
            flat[name] = values[name]
    per_stage = model.num_layers // layout.pp
    for local in range(per_stage):
        layer = _layer(values, model, layout, t, p * per_stage + local)
        flat |= {f"decoder.layers.{local}.{name}": value for name, value in layer.items()}
    if last:
        for kind in ("weight", "bias"):
            if f"final_norm.{kind}" in values:
                flat[f"decoder.final_layernorm.{kind}"] = values[f"final_norm.{kind}"]
        if not tied:
            flat["output_layer.weight"] = vocabulary("output_layer.weight")
        elif not first:
            flat["output_layer.weight"] = vocabulary("embedding.word_embeddings.weight")
    if layout.style != "legacy":
        return flat | {"output_layer._extra_state": None}
    return _nested(flat, tied=tied)


def _nested(flat: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The dictionaries in dictionaries of the legacy models."""
    language: dict[str, Any] = {"encoder": {}}
    model: dict[str, Any] = {"language_model": language}
    for name, value in flat.items():
        if name.startswith("decoder."):
            inner = name.removeprefix("decoder.").replace("final_layernorm", "final_norm")
            language["encoder"][inner] = value
        elif name.startswith("embedding."):
            _, table, kind = name.split(".")
            language.setdefault("embedding", {})[table] = {kind: value}
        elif tied:
            model["word_embeddings_for_head"] = {"weight": value}
        else:
            language["output_layer"] = {"weight": value}
    return model


def _layer(
    values: Mapping[str, Tensor], model: ModelConfig, layout: Layout, t: int, number: int
) -> dict[str, Any]:
    """One layer's shards on tensor rank t."""
    names: dict[str, Any] = LEGACY if layout.style == "legacy" else LOCAL
    ours, found = f"layers.{number}", {}

    def part(name: str, kind: str, *, dim: int = 0) -> Tensor:
        return values[f"{ours}.{name}.{kind}"].chunk(layout.tp, dim=dim)[t]

    if layout.style == "te":
        found[f"{names['qkv']}._extra_state"] = BytesIO(b"scales")  # before its release 2.0
    for kind in ("weight", "bias"):
        for norm, theirs in zip(("input_norm", "post_attention_norm"), names["norm"], strict=True):
            if f"{ours}.{norm}.{kind}" in values:
                inside = {"input_norm": names["qkv"], "post_attention_norm": names["up"]}[norm]
                key = f"{inside}.layer_norm_{kind}" if layout.style == "te" else f"{theirs}.{kind}"
                found[key] = values[f"{ours}.{norm}.{kind}"]
        for norm, theirs in (("query_norm", "q_layernorm"), ("key_norm", "k_layernorm")):
            if f"{ours}.attention.{norm}.{kind}" in values:
                key = f"self_attention.{theirs}.{kind}"
                found[key] = values[f"{ours}.attention.{norm}.{kind}"]
        if f"{ours}.attention.query.{kind}" not in values:
            continue
        found[f"{names['qkv']}.{kind}"] = _interleave(
            *(part(f"attention.{n}", kind) for n in ("query", "key", "value")), model
        )
        up = [part(f"mlp.{n}", kind) for n in (("gate", "up") if model.swiglu else ("up",))]
        found[f"{names['up']}.{kind}"] = torch.cat(up)
        row = {"dim": 1} if kind == "weight" else None
        for name, theirs in (("attention.output", "output"), ("mlp.down", "down")):
            whole = values[f"{ours}.{name}.{kind}"]
            found[f"{names[theirs]}.{kind}"] = part(name, kind, **row) if row else whole
    return found


def _interleave(query: Tensor, key: Tensor, value: Tensor, model: ModelConfig) -> Tensor:
    """Group by group: its query heads, its key, its value."""
    d = model.kv_channels
    per_group = model.num_attention_heads // model.num_query_groups
    rows = []
    for g in range(len(key) // d):
        for head in range(g * per_group, (g + 1) * per_group):
            rows.append(query[head * d : (head + 1) * d])
        rows += [key[g * d : (g + 1) * d], value[g * d : (g + 1) * d]]
    return torch.cat(rows)
