"""Where the logical tensors lie in Hugging Face's LlamaForCausalLM and GPT2LMHeadModel.

Both pair halves of a head in RoPE as we do, so no rows are permuted. Imports no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.schema import ModelConfig
from megatron_lite.sharding.plan import LogicalTensor

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"
_LLAMA_LAYER = {
    "input_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GPT2_NORMS = {"input_norm": "ln_1", "post_attention_norm": "ln_2"}
_GPT2_LINEAR = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


@dataclass(frozen=True)
class Part:
    """A logical tensor is rows `[row, row + n)` of a parameter, after transposing it if so said."""

    parameter: str
    row: int = 0
    transposed: bool = False

    def take(self, whole: Tensor, rows: int) -> Tensor:
        """The logical tensor of `rows` rows out of the parameter."""
        values = whole.t() if self.transposed else whole
        return values[self.row : self.row + rows]


Parts = dict[str, Part]


def architecture(model: ModelConfig) -> str:
    """Which of the two classes a model section describes; CheckpointError for neither."""
    seen = (model.position_embedding_type, model.normalization, model.swiglu)
    biases = (model.add_bias_linear, model.add_qkv_bias)
    if seen == ("rope", "RMSNorm", True) and model.rotary_percent == 1.0 and len({*biases}) == 1:
        return LLAMA
    own_heads = model.num_query_groups == model.num_attention_heads
    square = own_heads and model.num_attention_heads * model.kv_channels == model.hidden_size
    tied = not model.untie_embeddings_and_output_weights
    if seen == ("learned_absolute", "LayerNorm", False) and all((*biases, square, tied)):
        return GPT2
    raise CheckpointError(
        f"the config's model is neither {LLAMA} (position_embedding_type rope, rotary_percent 1, "
        "normalization RMSNorm, swiglu true, add_qkv_bias as add_bias_linear) nor "
        f"{GPT2} (learned_absolute, LayerNorm, swiglu false, biases, tied, no grouped heads); no "
        "other is converted"
    )


def parts_of(model: ModelConfig, table: Mapping[str, LogicalTensor]) -> Parts:
    """Where each logical tensor of `table` lies; CheckpointError naming all that have no place."""
    modules = _llama(model) if architecture(model) == LLAMA else _gpt2(model)
    parts, homeless = {}, []
    for name in table:
        module, _, kind = name.rpartition(".")
        part = modules.get(module)
        if part is None:
            homeless.append(name)
        else:
            parts[name] = Part(f"{part.parameter}.{kind}", part.row, part.transposed)
    if homeless:
        raise CheckpointError(f"{architecture(model)} has no place for {', '.join(homeless)}")
    return parts


def _llama(model: ModelConfig) -> Parts:
    modules = {
        "embedding.word_embeddings": Part("model.embed_tokens"),
        "final_norm": Part("model.norm"),
        "output_layer": Part("lm_head"),
    }
    for n in range(model.num_layers):
        for ours, theirs in _LLAMA_LAYER.items():
            modules[f"layers.{n}.{ours}"] = Part(f"model.layers.{n}.{theirs}")
    return modules


def _gpt2(model: ModelConfig) -> Parts:
    """Its matrices are [in, out], and query, key and value lie side by side in one."""
    modules = {
        "embedding.word_embeddings": Part("transformer.wte"),
        "embedding.position_embeddings": Part("transformer.wpe"),
        "final_norm": Part("transformer.ln_f"),
    }
    rows = model.num_attention_heads * model.kv_channels
    for n in range(model.num_layers):
        ours, theirs = f"layers.{n}", f"transformer.h.{n}"
        for mine, other in _GPT2_NORMS.items():
            modules[f"{ours}.{mine}"] = Part(f"{theirs}.{other}")
        for mine, other in _GPT2_LINEAR.items():
            modules[f"{ours}.{mine}"] = Part(f"{theirs}.{other}", transposed=True)
        for i, mine in enumerate(("query", "key", "value")):
            fused = Part(f"{theirs}.attn.c_attn", row=i * rows, transposed=True)
            modules[f"{ours}.attention.{mine}"] = fused
    return modules


def parameters(parts: Parts) -> dict[str, list[str]]:
    """The logical tensors that make up each parameter, by row."""
    found: dict[str, list[str]] = {}
    for name, part in sorted(parts.items(), key=lambda item: item[1].row):
        found.setdefault(part.parameter, []).append(name)
    return found


def parameter_shapes(
    parts: Parts, table: Mapping[str, LogicalTensor]
) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter."""
    shapes = {}
    for parameter, names in parameters(parts).items():
        _, *tail = table[names[0]].shape
        shape = (sum(table[name].shape[0] for name in names), *tail)
        shapes[parameter] = shape[::-1] if parts[names[0]].transposed else shape
    return shapes


def join(parts: list[tuple[Part, Tensor]]) -> Tensor:
    """A parameter from all the logical tensors in it, by row; the reverse of `Part.take`."""
    whole = torch.cat([values for _, values in parts])
    return whole.t().contiguous() if parts[0][0].transposed else whole
