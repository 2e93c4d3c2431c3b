"""What the papers say about each schedule: idle time and activations, to set beside ours.

Formulas only, from the sources named in each line; compared with the simulator by tests and by
tools/pipeline_timeline.py --compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_lite.pipeline.simulate import Times


@dataclass(frozen=True)
class Published:
    """A schedule's formulas, all of (ranks, micro-batches, stages a rank).

    `idle` also takes the times of a rank's whole share of the model and returns a rank's idle time
    in a step. `fewest` and `most` bound the peak of live activations of a rank, counted in
    micro-batches of one stage, so that with v stages a rank v of them are 1F1B's unit.
    """

    idle: Callable[[int, int, int, Times], float]
    fewest: Callable[[int, int, int], float]
    most: Callable[[int, int, int], float]

    def bubble(self, num_ranks: int, num_microbatches: int, chunks: int, times: Times) -> float:
        """Idle time / length of the step, from 0 (none) towards 1."""
        idle = self.idle(num_ranks, num_microbatches, chunks, times)
        return idle / (num_microbatches * (times.forward + times.backward) + idle)


def _all_of_1f1b(p: int, m: int, v: int, times: Times) -> float:
    """(p - 1)(F + B), for a ratio of (p - 1) / (m + p - 1) (arXiv:2104.04473)."""
    return (p - 1) * (times.forward + times.backward)


def _interleaved(p: int, m: int, v: int, times: Times) -> float:
    """(p - 1) / (v m) over the ideal time (arXiv:2104.04473)."""
    return _all_of_1f1b(p, m, v, times) / v


def _chimera(p: int, m: int, v: int, times: Times) -> float:
    """(p - 2) / (2 m + p - 2) of the step at F = B (arXiv:2107.06925, m over both directions)."""
    return (p / 2 - 1) * (times.forward + times.backward)


def _zb_h1(p: int, m: int, v: int, times: Times) -> float:
    """(p - 1)(F + B - W), B the input's part (arXiv:2401.10241)."""
    return (p - 1) * (times.forward + times.backward - 2 * times.weight)


def _zbv(p: int, m: int, v: int, times: Times) -> float:
    """(p - 1) / (p - 1 + 6 m) of the step at F = B = W (Primus; arXiv:2401.10241 says zero)."""
    return (p - 1) * (times.forward + times.backward) / 6


def _dualpipev(p: int, m: int, v: int, times: Times) -> float:
    """(P / 2 - 1)(F&B + B_full - 3 W), P = 2 p stages (DualPipe), F&B taken as F + B_full."""
    return (p - 1) * (times.forward + 2 * times.backward - 3 * times.weight) / v


PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "gpipe": Published(_all_of_1f1b, lambda p, m, v: m, lambda p, m, v: m),
        "1f1b": Published(_all_of_1f1b, lambda p, m, v: min(p, m), lambda p, m, v: min(p, m)),
        "interleaved": Published(
            _interleaved, lambda p, m, v: p * v + p - 1, lambda p, m, v: p * v + p - 1
        ),
        "chimera": Published(_chimera, lambda p, m, v: p / 2 + 1, lambda p, m, v: p),
        "zb-h1": Published(_zb_h1, lambda p, m, v: p, lambda p, m, v: p),
        "zbv": Published(_zbv, lambda p, m, v: 2 * p, lambda p, m, v: 2 * p),
        "dualpipev": Published(_dualpipev, lambda p, m, v: 2 * p + 1, lambda p, m, v: 2 * p + 1),
    }
)
