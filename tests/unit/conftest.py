"""A run that many tests begin with."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def small_run() -> dict[str, Any]:
    """The least that a run must say."""
    return {
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 8,
            "seq_length": 32,
            "vocab_size": 100,
        },
        "training": {"micro_batch_size": 2, "global_batch_size": 16, "train_iters": 10},
        "optimizer": {"lr": 1e-3},
        "data": {"data_path": "corpus"},
    }
