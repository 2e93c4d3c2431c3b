"""Histograms in fixed bins: what they count, and that parts add up to the whole."""

from __future__ import annotations

import numpy as np
import torch

from megatron_lite.monitoring.histograms import Histogram, edges

CPU = torch.device("cpu")


def histogram(values: torch.Tensor) -> Histogram:
    made = Histogram.empty(CPU)
    made.add(values)
    return made


def test_counts_are_numpys() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.02
    values[:7] = 0
    found = histogram(values.view(50, 100))
    expected, _ = np.histogram(values.double().numpy(), bins=edges().numpy())
    assert found.counts.tolist() == expected.tolist()


def test_parts_add_up() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    whole, parts = histogram(values), [histogram(part) for part in values.split(300)]
    assert torch.equal(sum(p.counts for p in parts), whole.counts)  # type: ignore[arg-type]
    assert torch.allclose(sum(p.sums for p in parts), whole.sums)  # type: ignore[arg-type]
    extremes = torch.stack([p.extremes for p in parts]).amax(dim=0)
    assert extremes.tolist() == [-float(values.min()), float(values.max())]


def test_what_tensorboard_gets() -> None:
    raw = histogram(torch.tensor([-2.0, 0.0, 0.0, 3.0, 1e30, torch.inf, torch.nan])).raw()
    assert (raw["min"], raw["max"], raw["num"]) == (-2.0, float(torch.tensor(1e30)), 5.0)
    assert sum(raw["bucket_counts"]) == 5 and raw["bucket_counts"][0] == 0
    assert len(raw["bucket_limits"]) == len(raw["bucket_counts"])
    assert raw["bucket_limits"] == sorted(raw["bucket_limits"])
    zeros = next(
        count
        for low, high, count in zip(
            raw["bucket_limits"], raw["bucket_limits"][1:], raw["bucket_counts"][1:], strict=False
        )
        if low < 0 < high
    )
    assert zeros == 2
