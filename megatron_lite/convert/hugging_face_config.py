"""Hugging Face's config.json of a model: compared before an import, written beside an export.

It holds what shapes can't tell: heads, RoPE base, epsilon. Imports no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.foreign import refuse
from megatron_lite.convert.hugging_face import GPT2, LLAMA, architecture

FILE_NAME = "config.json"
_DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    GPT2: {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
}
"""What LlamaConfig and GPT2Config take where the file, which may leave them out, has nothing."""


def fields(model: ModelConfig, *, vocab_size: int) -> dict[str, Any]:
    """The file's content for a model section; CheckpointError where no class fits."""
    kind = architecture(model)
    head = {"architectures": [kind], "vocab_size": vocab_size}
    if kind == GPT2:
        return head | {
            "model_type": "gpt2",
            "n_positions": model.max_position_embeddings,
            "n_embd": model.hidden_size,
            "n_inner": model.ffn_hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": "gelu_new",
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        }
    return head | {
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "rope_theta": model.rotary_base,  # where transformers before 5 looks for it
        "hidden_act": "silu",
        "attention_bias": model.add_qkv_bias,
        "mlp_bias": model.add_bias_linear,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def check(path: Path, model: ModelConfig, *, vocab_size: int) -> None:
    """CheckpointError naming all that the file and the model section say differently."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{path}: is no JSON object")
    kind = architecture(model)
    wanted = fields(model, vocab_size=vocab_size)
    given = {**_DEFAULTS[kind], **raw}
    refuse(f"{path} is no config.json of {kind}", _unusable(given, kind))
    found = _completed(given, kind)
    ignored = ("architectures", "max_position_embeddings", "rope_parameters")
    lines = [
        f"{key} is {found.get(key)!r}, the run config's model has {value!r}"
        for key, value in wanted.items()
        if key not in ignored and found.get(key) != value
    ]
    if found.get("rope_type", "default") != "default":
        lines.append(f"rope_type is {found['rope_type']}: only the default is supported")
    refuse(f"{path} and the run config describe different models", lines)


def _unusable(given: Mapping[str, Any], kind: str) -> list[str]:
    """A line for each value that `_completed` could not compute with."""
    sizes = ("n_embd",) if kind == GPT2 else ("hidden_size", "num_attention_heads")
    lines = [
        f"{key} is {given[key]!r}, not a whole number above 0"
        for key in sizes
        if type(given[key]) is not int or given[key] < 1
    ]
    ropes = {key: given.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
    lines += [
        f"{key} is {rope!r}, no JSON object"
        for key, rope in ropes.items()
        if not isinstance(rope, Mapping)
    ]
    bases = [o.get("rope_theta") or 0 for o in (given, *ropes.values()) if isinstance(o, Mapping)]
    lines += [
        f"rope_theta is {base!r}, no number" for base in bases if not isinstance(base, int | float)
    ]
    return lines


def _completed(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """With what follows from other values where it is null or absent."""
    if kind == GPT2:
        return found | {"n_inner": found.get("n_inner") or 4 * found["n_embd"]}
    heads = found["num_attention_heads"]
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}  # as transformers does
    return found | {
        "num_key_value_heads": found.get("num_key_value_heads") or heads,
        "head_dim": found.get("head_dim") or found["hidden_size"] // heads,
        "rope_theta": float(rope.get("rope_theta") or found.get("rope_theta") or 10000.0),
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
    }
