"""The documents of an iteration."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.data.errors import DataError
from megatron_lite.data.provenance import which_documents
from megatron_lite.progress import Progress
from tests.distributed.models import write_corpus
from tests.distributed.small import small_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Four samples a step, after eight in steps of two."""
    corpus = write_corpus(tmp_path / "corpus")
    return small_config(
        tmp_path / "run.json", corpus, training={"rampup_batch_size": [2, 2, 8], "train_iters": 9}
    )


def test_an_iteration_is_found_from_anywhere_before_it(config: Path) -> None:
    loaded = load_config(config, ["data.skip_samples=[[3, 6], [13, 14]]"], 2)
    lines = list(which_documents(loaded.config, Progress(), iteration=5, dp=2))
    # 0 1 | 2 6 | 7 8 | 9 10 | 11 12 14 15
    assert lines[:2] == [
        "iteration 5: samples 11 to 15 of the run",
        'without them: "skip_samples": [[11, 16]] in the section data',
    ]
    heads = [line for line in lines if line.startswith(("replica", "  sample"))]
    assert [head.split(":")[0].strip() for head in heads] == [
        *("replica 0, micro-batch 0", "sample 11", "replica 0, micro-batch 1", "sample 14"),
        *("replica 1, micro-batch 0", "sample 12", "replica 1, micro-batch 1", "sample 15"),
    ]
    later = Progress(iteration=2, consumed_samples=4, left_out_samples=3)
    assert list(which_documents(loaded.config, later, iteration=5, dp=2)) == lines


def test_what_was_before_is_not_known(config: Path) -> None:
    loaded = load_config(config, [], 1)
    with pytest.raises(DataError, match="iteration 3 does not come after 3"):
        list(which_documents(loaded.config, Progress(iteration=3), iteration=3, dp=1))
