"""Resets of positions and attention at ends of documents are the same on every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from tests.distributed.models import GPT, LLAMA, VOCAB
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import train
from tests.distributed.small import TINY, layout, small_config
from tests.distributed.test_parity import assert_same_training

RESETS = ["data.reset_position_ids=true", "data.reset_attention_mask=true"]
MODELS = {
    "gpt": {key: TINY[key] for key in GPT},
    "llama": LLAMA | {key: TINY[key] for key in ("num_layers", "hidden_size", "seq_length")},
}


def write_documents(prefix: Path) -> Path:
    """Documents of 2 to 12 tokens that end in NullTokenizer's end of document."""
    rng = np.random.default_rng(3)
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for _ in range(200):
        length = int(rng.integers(1, 12))
        builder.add_document([*rng.integers(0, VOCAB - 1, length), VOCAB - 1])
    builder.finalize()
    return prefix


@pytest.mark.parametrize(
    ("model", "more"),
    [("gpt", ["parallel.sequence_parallel=true"]), ("llama", [])],
)
def test_layouts_agree_on_packed_documents(model: str, more: list[str], tmp_path: Path) -> None:
    """Tensor 2 x pipeline 2: grouped heads, learned positions cut by sequence parallelism."""
    config = small_config(
        tmp_path / "run.json",
        write_documents(tmp_path / "documents"),
        model=MODELS[model],
        training={"train_iters": 2, "recompute_granularity": "full", "eval_interval": 2},
    )
    folders = [tmp_path / name for name in ("one", "four")]
    for folder in folders:
        folder.mkdir()
    (one,) = on_ranks(1, train, config, RESETS, folders[0])
    four = on_ranks(4, train, config, [*layout(2, 2), *more, *RESETS], folders[1])
    assert_same_training(four, one)
