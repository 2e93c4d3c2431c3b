"""An all-reduce over each group of a rank: is the sum right, how fast is it, does it end at all?

All groups of a kind run at the same time, as in training, so they share what they share there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.health.preflight.comparison import Reading

BYTES: Mapping[str, int] = {"cuda": 64 << 20, "cpu": 1 << 20}
"""Size of the tensor. On GPUs enough for the bandwidth to show over the latency: it takes some
milliseconds on InfiniBand, and less than a second a time over Ethernet. Sums of processors go
through gloo, on machines that have no better network."""
REPEATS = 2
"""Of which the fastest counts."""
JITTER: Mapping[str, float] = {"cuda": 0.0005, "cpu": 0.02}
"""Seconds that a measurement may be too long by chance: processes without a GPU share cores, whose
scheduler gives them away for some milliseconds."""
LIMIT = 30.0
"""Seconds within which all all-reduces over one group must be done, and NCCL have opened it."""
_VALUES = 1000
"""The tensor counts up to this and begins anew."""


class Members(Protocol):
    """Ranks that communicate, seen from one of them (see mpu.groups.Group)."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their ranks in the world."""

    @property
    def rank(self) -> int:
        """This process's index among them."""

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """Their process group."""


@contextmanager
def time_limit(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` from a thread of its own where the block takes longer; it may hang for ever."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def measure(kind: str, group: Members, device: torch.device) -> Reading:
    """All-reduce over the group; a collective call over it.

    Integers, whose sum is exact in any order: element i of member m is i modulo 1000, plus m.
    """
    count = BYTES[device.type] // 4
    pattern = torch.arange(count, dtype=torch.int32, device=device) % _VALUES
    size = len(group.ranks)
    expected = pattern * size + size * (size - 1) // 2
    fastest, correct = float("inf"), True
    for _ in range(1 + REPEATS):  # the first one opens the connections, too
        own = pattern + group.rank
        seconds = _timed(own, group.handle)
        correct = correct and bool(torch.equal(own, expected))
        fastest = min(fastest, seconds)
    return Reading(kind, group.ranks, fastest, BYTES[device.type] / fastest / 1e9, correct)


def tidy(device: torch.device) -> None:
    """Leave no trace in what a run reports of its memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _timed(tensor: Tensor, handle: Any) -> float:
    """Seconds of one all-reduce in place, after all members have come to it."""
    dist.all_reduce(torch.zeros(1, device=tensor.device), group=handle)
    _finish(tensor.device)
    started = time.perf_counter()
    dist.all_reduce(tensor, group=handle)
    _finish(tensor.device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
