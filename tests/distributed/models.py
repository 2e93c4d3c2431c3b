"""The tiny models of the distributed tests as config sections; std 0.1 shows layout errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder

VOCAB = 90
"""Padded to 96: on four tensor-parallel ranks the last one holds 18 true rows and 6 of padding."""
SHAPE = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 8,
    "init_method_std": 0.1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LLAMA = SHAPE | {
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
GPT = SHAPE | {"ffn_hidden_size": 128}
"""GPT-2's style: tied, LayerNorm, biases, learned positions."""


def write_corpus(prefix: Path, *, documents: int = 40, seed: int = 7, vocab: int = VOCAB) -> Path:
    """Documents of 5 to 300 random tokens."""
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for _ in range(documents):
        builder.add_document(rng.integers(0, vocab, rng.integers(5, 301)))
    builder.finalize()
    return prefix


def write_config(path: Path, corpus: Path, model: dict[str, Any], **sections: Any) -> Path:
    """A complete run of 10 steps in fp32; `sections` are merged over it."""
    config: dict[str, Any] = {
        "model": model,
        "training": {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 10},
        "optimizer": {"lr": 1e-3, "lr_decay_style": "constant", "weight_decay": 0.1},
        "precision": {"dtype": "fp32"},
        "data": {"data_path": str(corpus), "split": "90,10,0", "tokenizer_type": "NullTokenizer"},
        "logging": {"log_interval": 1, "tensorboard_dir": None},
    }
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    path.write_text(json.dumps(config))
    return path
