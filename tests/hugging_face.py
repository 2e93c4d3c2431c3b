"""Hugging Face's LLaMA and GPT-2 from logical tensors: an implementation that shares no code."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megatron_lite.config.schema import ModelConfig

LLAMA_LAYER = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def as_llama(values: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Logical tensors (weights or their gradients) under LlamaForCausalLM's names."""
    found = {
        "model.embed_tokens.weight": values["embedding.word_embeddings.weight"],
        "model.norm.weight": values["final_norm.weight"],
        "lm_head.weight": values["output_layer.weight"],
    }
    for i in range(layers):
        for ours, theirs in LLAMA_LAYER.items():
            found[f"model.layers.{i}.{theirs}.weight"] = values[f"layers.{i}.{ours}.weight"]
            if f"layers.{i}.{ours}.bias" in values:
                found[f"model.layers.{i}.{theirs}.bias"] = values[f"layers.{i}.{ours}.bias"]
    return found


def as_gpt2(values: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Logical tensors under GPT2LMHeadModel's names; its matrices are [in, out]."""
    found = {
        "transformer.wte.weight": values["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": values["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": values["final_norm.weight"],
        "transformer.ln_f.bias": values["final_norm.bias"],
    }
    names = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for i in range(layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        for part in ("weight", "bias"):
            found[f"{theirs}.ln_1.{part}"] = values[f"{ours}.input_norm.{part}"]
            found[f"{theirs}.ln_2.{part}"] = values[f"{ours}.post_attention_norm.{part}"]
            fused = [values[f"{ours}.attention.{n}.{part}"] for n in ("query", "key", "value")]
            found[f"{theirs}.attn.c_attn.{part}"] = torch.cat(fused).t()
            for mine, other in names.items():
                found[f"{theirs}.{other}.{part}"] = values[f"{ours}.{mine}.{part}"].t()
    return found


def llama(model: ModelConfig, values: Mapping[str, Tensor], *, vocab_size: int) -> LlamaForCausalLM:
    """The model with these weights, float32."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        max_position_embeddings=model.seq_length,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config)
    made.load_state_dict(as_llama(values, model.num_layers))
    return made


def gpt2(model: ModelConfig, values: Mapping[str, Tensor], *, vocab_size: int) -> GPT2LMHeadModel:
    """The model with these weights, float32."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=model.hidden_size,
        n_inner=model.ffn_hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        n_positions=model.max_position_embeddings,
        layer_norm_epsilon=model.norm_epsilon,
        activation_function="gelu_new",
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    made = GPT2LMHeadModel(config)
    faults = made.load_state_dict(as_gpt2(values, model.num_layers), strict=False)
    assert faults.missing_keys == ["lm_head.weight"]  # the tied table under its second name
    assert not faults.unexpected_keys
    return made
