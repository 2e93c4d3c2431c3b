"""`model`: the shape of the network. Sizes are logical: no padding, no cut over ranks."""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import (
    DERIVE,
    Derived,
    Flag,
    Fraction,
    Number,
    PositiveNumber,
    PositiveWhole,
    Section,
)


class ModelConfig(Section):
    """The shape of a decoder-only transformer."""

    num_layers: PositiveWhole
    """Transformer layers of the whole model, all pipeline stages together."""

    hidden_size: PositiveWhole
    """Columns of the residual stream."""

    num_attention_heads: PositiveWhole
    """Query heads of a layer."""

    seq_length: PositiveWhole
    """Tokens of a training sample."""

    ffn_hidden_size: Derived[PositiveWhole] = DERIVE
    """Inner columns of the MLP. null: 4 x hidden_size; with swiglu two thirds of that, rounded down
    to a multiple of 64 (at least 64), so that both kinds have about as many parameters."""

    kv_channels: Derived[PositiveWhole] = DERIVE
    """Columns of one attention head. null: hidden_size / num_attention_heads."""

    num_query_groups: Derived[PositiveWhole] = DERIVE
    """Key/value heads of a layer; each serves the same number of query heads (GQA). null:
    num_attention_heads."""

    vocab_size: PositiveWhole | None = None
    """Token ids of the vocabulary, before padding. null: the tokenizer's."""

    max_position_embeddings: Derived[PositiveWhole] = DERIVE
    """Rows of the table of learned positions, in tokens. null: seq_length."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How a token learns its position: a learned table, rotary embeddings of queries and keys, or
    not at all."""

    rotary_base: PositiveNumber = 10000.0
    """Base of the rotary wavelengths (theta); read with rope."""

    rotary_percent: Fraction = 1.0
    """Share of a head's columns that rope turns, above 0, up to 1; read with rope."""

    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of every norm of the model."""

    norm_epsilon: PositiveNumber = 1e-5
    """Added to the variance (LayerNorm) or mean square (RMSNorm) before the root."""

    swiglu: Flag = False
    """true: gated MLP, SiLU(gate) x up. false: GELU in its tanh approximation."""

    add_bias_linear: Flag = True
    """Biases on the linear layers of attention and MLP; the output layer has none."""

    add_qkv_bias: Derived[Flag] = DERIVE
    """Biases on query, key and value. null: as add_bias_linear."""

    qk_layernorm: Flag = False
    """Normalise each head's query and key before the scores."""

    untie_embeddings_and_output_weights: Flag = False
    """true: the output layer has a weight of its own. false: it is the word embedding."""

    make_vocab_size_divisible_by: PositiveWhole = 128
    """The vocabulary is padded to a multiple of this; tensor_model_parallel_size must divide it."""

    init_method_std: Number = 0.02
    """Standard deviation of the initial weights."""

    attention_dropout: Fraction = 0.1
    """Probability of dropping an attention weight. 0: none."""

    hidden_dropout: Fraction = 0.1
    """Probability of dropping an activation after the embedding, attention and MLP. 0: none."""
