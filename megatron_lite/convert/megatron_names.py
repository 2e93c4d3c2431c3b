"""What Megatron-LM calls its tensors: its legacy models and mcore's, plain or Transformer Engine's.

A module of ours has several possible names there; a checkpoint has one of them. Names are those of
a flattened state dict, `{kind}` is weight or bias.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

LAYERS = ("decoder.layers", "language_model.encoder.layers", "language_model.transformer.layers")
OUTSIDE = {
    "embedding.word_embeddings": (
        "embedding.word_embeddings.{kind}",
        "language_model.embedding.word_embeddings.{kind}",
    ),
    "embedding.position_embeddings": (
        "embedding.position_embeddings.{kind}",
        "language_model.embedding.position_embeddings.{kind}",
    ),
    "final_norm": (
        "decoder.final_layernorm.{kind}",
        "language_model.encoder.final_norm.{kind}",
        "language_model.encoder.final_layernorm.{kind}",
        "language_model.transformer.final_layernorm.{kind}",
    ),
    "output_layer": ("output_layer.{kind}", "language_model.output_layer.{kind}"),
}
QUERY_KEY_VALUE = (
    "self_attention.query_key_value.{kind}",
    "self_attention.linear_qkv.{kind}",
    "attention.query_key_value.{kind}",
)
UP = ("mlp.dense_h_to_4h.{kind}", "mlp.linear_fc1.{kind}")
"""With SwiGLU the gate lies above it."""
INSIDE = {
    "input_norm": (
        "input_norm.{kind}",
        "input_layernorm.{kind}",
        "self_attention.linear_qkv.layer_norm_{kind}",
    ),
    "attention.query": QUERY_KEY_VALUE,
    "attention.key": QUERY_KEY_VALUE,
    "attention.value": QUERY_KEY_VALUE,
    "attention.query_norm": ("self_attention.q_layernorm.{kind}",),
    "attention.key_norm": ("self_attention.k_layernorm.{kind}",),
    "attention.output": (
        "self_attention.dense.{kind}",
        "self_attention.linear_proj.{kind}",
        "attention.dense.{kind}",
    ),
    "post_attention_norm": (
        "post_attention_norm.{kind}",
        "post_attention_layernorm.{kind}",
        "pre_mlp_layernorm.{kind}",
        "mlp.linear_fc1.layer_norm_{kind}",
    ),
    "mlp.gate": UP,
    "mlp.up": UP,
    "mlp.down": ("mlp.dense_4h_to_h.{kind}", "mlp.linear_fc2.{kind}"),
}
TIED_COPIES = (
    "word_embeddings_for_head.weight",
    *(n.format(kind="weight") for n in OUTSIDE["output_layer"]),
)
"""Where the last stage keeps its copy of a tied embedding."""
_NO_WEIGHTS = ("_extra_state", "inv_freq")
"""Transformer Engine's scales and tables that are computed from the config."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dictionaries, keys joined by dots; what is no weight is left out."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flatten(value, f"{name}.")
        elif isinstance(value, Tensor) and name.rpartition(".")[2] not in _NO_WEIGHTS:
            found[name] = value
    return found


def count_layers(names: Collection[str]) -> int:
    """Layers of a pipeline stage, which numbers its own from 0."""
    numbers = {
        name.removeprefix(f"{prefix}.").split(".")[0]
        for name in names
        for prefix in LAYERS
        if name.startswith(f"{prefix}.")
    }
    return len(numbers)


def find(names: Collection[str], tensor: str, *, first_layer: int) -> str | None:
    """The name of a stage's tensor that holds one of ours; None where the stage has none.

    `first_layer` is the number in the whole model of the stage's layer 0.
    """
    module, _, kind = tensor.rpartition(".")
    if module in OUTSIDE:
        candidates = [name.format(kind=kind) for name in OUTSIDE[module]]
    else:
        _, number, inner = module.split(".", 2)
        local = int(number) - first_layer
        candidates = [
            f"{prefix}.{local}.{name.format(kind=kind)}"
            for prefix in LAYERS
            for name in INSIDE[inner]
        ]
    return next((name for name in candidates if name in names), None)
