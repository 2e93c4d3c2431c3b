"""Fewer micro-batches than stages, odd numbers, and losses that count other tokens in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.many import Run, train_on
from tests.distributed.plain import assert_close, mask_unequally, plain_step, unequal_mask
from tests.distributed.runs import merged
from tests.distributed.schedules import overrides
from tests.distributed.small import small_config

CASES = [
    ("gpipe", 3),
    ("1f1b", 1),
    ("chimera", 2),
    ("zb-h1", 3),
    ("zbv", 5),
    ("dualpipev", 1),
]
"""Schedules on four ranks, with samples a step of one micro-batch each."""


def test_few_and_odd_micro_batches_with_unequal_masks_equal_plain_autograd(
    corpus: Path, tmp_path: Path
) -> None:
    """The first step's loss, norm and clipped gradients, in fp32."""
    config = small_config(
        tmp_path / "run.json", corpus, model={"num_layers": 8}, training={"train_iters": 1}
    )
    batches = [[f"training.global_batch_size={count}"] for _, count in CASES]
    runs = [
        Run(config, overrides(name, 4, 1) + batch, mask_unequally)
        for (name, _), batch in zip(CASES, batches, strict=True)
    ]
    found = train_on(4, runs, tmp_path)
    for case, batch, results in zip(CASES, batches, found, strict=True):
        expected = plain_step(config, batch, mask=unequal_mask)
        first = results[0]
        assert first.losses == pytest.approx([expected.loss], rel=1e-5), case
        assert first.norms == pytest.approx([expected.norm], rel=1e-5), case
        moments = merged([result.first_moments for result in results])
        assert_close({n: m / 0.1 for n, m in moments.items()}, expected.clipped)
