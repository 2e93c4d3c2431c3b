"""Histograms that ranks can add up: fixed bins over magnitudes, so that only counts travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOWEST, HIGHEST, PER_DECADE = -8, 4, 10
"""Bins reach from 1e-8 to 1e4 on both sides of zero, ten a decade; what is beyond is counted in
the outermost ones."""


def edges() -> Tensor:
    """The bins' borders, float64, ascending; the middle bin holds the zeros."""
    steps = (HIGHEST - LOWEST) * PER_DECADE
    positive = torch.logspace(LOWEST, HIGHEST, steps + 1, dtype=torch.float64)
    return torch.cat([-positive.flip(0), positive])


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in bins, with the moments that TensorBoard shows.

    `extremes` is [−minimum, maximum] and `sums` is [count, sum, sum of squares], each float64, so
    that ranks can reduce them: the first by maximum, the others by sum.
    """

    counts: Tensor
    extremes: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> Histogram:
        """No values yet."""
        bins = len(edges()) - 1
        counts, sums = (torch.zeros(n, dtype=torch.float64, device=device) for n in (bins, 3))
        extremes = torch.full((2,), -torch.inf, dtype=torch.float64, device=device)
        return cls(counts, extremes, sums)

    def add(self, values: Tensor) -> None:
        """Count the values of a float32 tensor; those that are not finite are left out."""
        values = values.flatten()
        values = values[torch.isfinite(values)].double()
        if not values.numel():
            return
        borders = edges().to(values.device)
        at = torch.bucketize(values, borders[1:-1])
        self.counts.add_(torch.bincount(at, minlength=len(self.counts)).to(self.counts))
        low, high = values.aminmax()
        self.extremes.copy_(torch.maximum(self.extremes, torch.stack([-low, high]).to(self.sums)))
        moments = [values.new_tensor(values.numel()), values.sum(), values.square().sum()]
        self.sums.add_(torch.stack(moments).to(self.sums))

    def raw(self) -> dict[str, Any]:
        """The arguments of SummaryWriter.add_histogram_raw, empty bins at both ends left out."""
        filled = self.counts.nonzero().flatten()
        first, last = int(filled.min()), int(filled.max())
        limits = edges()[1:]
        limits[-1] = max(float(limits[-1]), float(self.extremes[1]))
        # One empty bin below: TensorBoard takes a bin's left border from the one before it.
        first = max(0, first - 1)
        return {
            "min": -float(self.extremes[0]),
            "max": float(self.extremes[1]),
            "num": float(self.sums[0]),
            "sum": float(self.sums[1]),
            "sum_squares": float(self.sums[2]),
            "bucket_limits": limits[first : last + 1].tolist(),
            "bucket_counts": self.counts[first : last + 1].tolist(),
        }
