"""The work that all contestants of train_step.py do: shapes, batch, optimizer settings, run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder


@dataclass(frozen=True)
class Shape:
    """A decoder with RMSNorm, rotary positions, SwiGLU and a tied embedding, and its batch."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int = 32_000
    seq_length: int = 512
    micro_batch_size: int = 4

    @property
    def parameters(self) -> int:
        """Weights of the whole model, norms included, the tied table once."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.vocab * self.hidden + self.layers * layer + self.hidden

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batch_size * self.seq_length

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for the command line of a contestant's process."""
        return asdict(self)


SHAPES = {
    "30m": Shape(hidden=512, layers=4, heads=8, ffn=1344),
    "125m": Shape(hidden=768, layers=12, heads=12, ffn=2048),
}
QUICK = {
    "30m": Shape(hidden=128, layers=2, heads=4, ffn=320, vocab=4096, seq_length=128),
    "125m": Shape(hidden=192, layers=3, heads=6, ffn=512, vocab=4096, seq_length=128),
}
"""The same program in seconds; its numbers say nothing about speed."""

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
CLIP = 1.0


def write_run(shape: Shape, folder: Path) -> None:
    """Write megatron_lite's config of the work, and a corpus of random tokens beside it."""
    corpus = IndexedDatasetBuilder(str(folder / "corpus"), np.uint16)
    generator = np.random.default_rng(1)
    for _ in range(64):
        corpus.add_document(generator.integers(0, shape.vocab, 4 * shape.seq_length))
    corpus.finalize()
    (folder / "config.json").write_text(json.dumps(run_config(shape)))


def run_config(shape: Shape) -> dict[str, Any]:
    """megatron_lite's config: the peers' network and step, ZeRO-1, no end in sight."""
    model = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.ffn,
        "seq_length": shape.seq_length,
        "vocab_size": shape.vocab,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return {
        "model": model,
        "training": {
            "micro_batch_size": shape.micro_batch_size,
            "global_batch_size": shape.micro_batch_size,
            "train_iters": 1_000_000,
            "clip_grad": CLIP,
        },
        "optimizer": {
            "lr": LEARNING_RATE,
            "lr_decay_style": "constant",
            "weight_decay": WEIGHT_DECAY,
        },
        "precision": {"dtype": "bf16"},
        "deepspeed": {"zero_optimization": {"stage": 1}},
        "data": {"data_path": "corpus", "split": "100,0,0", "tokenizer_type": "NullTokenizer"},
        "logging": {"log_interval": 10, "tensorboard_dir": None},
    }
