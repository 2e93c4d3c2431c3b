"""What a tensor holds that is not finite, and which of two findings comes first."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from megatron_lite.numerics.nonfinite import Finding, Phase, nonfinite_values


def test_what_a_tensor_holds() -> None:
    values = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    assert nonfinite_values(values) is None
    values[1, 2], values[2, 0], values[2, 3] = float("nan"), float("inf"), float("-inf")
    found = nonfinite_values(values)
    assert found is not None
    assert (found.nan, found.infinite, found.first) == (1, 2, (1, 2))
    assert (found.smallest, found.largest) == (0.0, 10.0)
    said = "bfloat16 [3, 4]: 1 NaN and 2 infinite, the first at [1, 2]; others 0 to 10"
    assert str(found) == said


def test_a_tensor_without_anything_finite() -> None:
    found = nonfinite_values(torch.tensor(float("inf")))
    assert found is not None and (found.first, found.smallest) == ((), None)
    assert str(found) == "float32 []: 1 infinite; no other"


def test_what_comes_first() -> None:
    """Weights, then micro-batches; in one of them down the stages and up again; sums at the end."""

    def finding(phase: Phase, stage: int, micro_batch: int | None, number: int = 1) -> Finding:
        return Finding(phase, stage, micro_batch, number, "", "", None)

    right = [
        finding("weight", 1, None),
        finding("forward", 0, 0, 7),
        finding("forward", 1, 0, 2),
        finding("forward", 1, 0, 3),
        finding("backward", 1, 0, 9),
        finding("backward", 0, 0, 1),
        finding("forward", 0, 1),
        finding("sum", 0, None),
    ]
    shuffled = random.Random(3).sample(right, len(right))
    assert sorted(shuffled, key=lambda one: one.order) == right
    assert replace(right[0], number=2).order > right[0].order
