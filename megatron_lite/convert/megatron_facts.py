"""Compare the arguments that a Megatron-LM checkpoint keeps with the model of a run config."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.foreign import refuse
from megatron_lite.convert.target import Target

_EQUAL: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "ffn_hidden_size": ("ffn_hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "kv_channels": ("kv_channels",),
    "position_embedding_type": ("position_embedding_type",),
    "normalization": ("normalization",),
    "norm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "swiglu": ("swiglu",),
    "add_bias_linear": ("add_bias_linear",),
    "qk_layernorm": ("qk_layernorm",),
    "untie_embeddings_and_output_weights": ("untie_embeddings_and_output_weights",),
}
"""Our fields and what Megatron has called them; one that it does not keep is not compared."""
_ROPE = ("rotary_base", "rotary_percent")
_REFUSED = (
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "multi_latent_attention",
    "no_rope_freq",
    "num_experts",
    "openai_gelu",
    "qk_l2_norm",
    "rotary_seq_len_interpolation_factor",
    "squared_relu",
    "use_rope_scaling",
    "virtual_pipeline_model_parallel_size",
    "window_size",
)
"""Of another model, or another layout of the file, than what is read here."""


def check(path: Path, args: Namespace, target: Target) -> None:
    """CheckpointError naming every argument that is not what the config says, or not supported."""
    kept, model = vars(args), target.model
    lines = [
        f"{name} is {kept[name]} in the checkpoint, model.{field} is {getattr(model, field)}"
        for field, name in _compared(kept, model)
        if not _same(kept[name], getattr(model, field))
    ]
    groups = _groups(kept)
    if groups is not None and groups != model.num_query_groups:
        lines.append(
            f"num_query_groups is {groups} in the checkpoint, model.num_query_groups is "
            f"{model.num_query_groups}"
        )
    biased = _query_key_value_bias(kept)
    if biased is not None and biased != model.add_qkv_bias:
        lines.append(
            f"add_bias_linear or add_qkv_bias is {biased} in the checkpoint, model.add_qkv_bias is "
            f"{model.add_qkv_bias}"
        )
    lines += _vocabulary(kept, target)
    refused = [name for name in _REFUSED if kept.get(name)]
    if kept.get("softmax_type") not in (None, "vanilla"):
        refused.append("softmax_type")
    lines += [f"{name} is {kept[name]}: not supported" for name in refused]
    refuse(f"{path}: the checkpoint's arguments and the config differ", lines)


def _compared(kept: dict[str, Any], model: ModelConfig) -> list[tuple[str, str]]:
    """(our field, Megatron's argument) of all that can be compared."""
    names = dict(_EQUAL)
    if model.position_embedding_type == "rope":
        names |= {field: (field,) for field in _ROPE}
    found = []
    for field, candidates in names.items():
        name = next((n for n in candidates if kept.get(n) is not None), None)
        if name is not None:
            found.append((field, name))
    return found


def _groups(kept: dict[str, Any]) -> int | None:
    """Key/value heads; without GQA Megatron's own number of them has no meaning."""
    grouped = kept.get("group_query_attention")
    if grouped is None:  # shapes tell
        return None
    return int(kept["num_query_groups" if grouped else "num_attention_heads"])


def _query_key_value_bias(kept: dict[str, Any]) -> bool | None:
    """Megatron's add_qkv_bias is for models whose other linear layers have no bias."""
    everywhere, here = kept.get("add_bias_linear"), kept.get("add_qkv_bias")
    if everywhere is None and not here:  # shapes tell
        return None
    return bool(everywhere or here)


def _vocabulary(kept: dict[str, Any], target: Target) -> list[str]:
    """A line where Megatron would not have padded the config's vocabulary to what it did."""
    padded, multiple = kept.get("padded_vocab_size"), kept.get("make_vocab_size_divisible_by")
    if not padded or not multiple:
        return []
    size = target.vocab_size
    multiple *= kept.get("tensor_model_parallel_size") or 1
    expected = -(-size // multiple) * multiple
    if padded == expected:
        return []
    return [f"padded_vocab_size is {padded} in the checkpoint, {expected} for {size} token ids"]


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, float):
        return abs(float(theirs) - ours) <= 1e-6 * abs(ours)
    return bool(theirs == ours)
