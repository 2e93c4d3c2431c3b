"""Is a loss far above what the last ones were? A robust rule: median and median deviation.

Pure. One outlier moves neither, so a spike does not hide the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

TO_SIGMA = 1.4826
"""Median absolute deviation × this is the standard deviation of a normal distribution."""


def spike_limit(losses: Sequence[float], *, window: int, threshold: float) -> float | None:
    """Return the largest loss that is no spike after `losses`, the last ones, oldest first.

    It is their median + `threshold` standard deviations, as estimated from the median of the
    distances to the median. None while there are fewer than `window`.

    >>> round(spike_limit([2.0, 2.1, 2.2, 2.1, 9.0], window=5, threshold=4), 3)
    2.693
    """
    if len(losses) < window:
        return None
    recent = losses[-window:]
    middle = median(recent)
    deviation = median(abs(loss - middle) for loss in recent)
    return middle + threshold * TO_SIGMA * deviation
