"""How far the nodes' clocks are from rank 0's, measured as NTP does, through the job's store.

A rank asks rank 0 for the time and takes the answer for that of the middle between question and
answer; of several exchanges the quickest is the most exact, to half of what it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_lite.health.preflight.exchange import Exchange

EXCHANGES = 5


@dataclass(frozen=True)
class Skew:
    """Seconds that a clock is ahead of rank 0's, known to within `error`."""

    seconds: float
    error: float

    @property
    def at_least(self) -> float:
        """Seconds of difference that are certain."""
        return max(0.0, abs(self.seconds) - self.error)


def clock_skews(
    exchange: Exchange,
    witnesses: Sequence[int],
    *,
    limit: float,
    patience: float,
    clock: Callable[[], float] | None = None,
) -> dict[int, Skew]:
    """Compare the clocks of some ranks, one of each node, with rank 0's; a collective call.

    Rank 0 gets all skews by rank, the others nothing. It gives all of them together `limit` seconds
    and leaves out who has not come by then; a rank gives rank 0 `patience` seconds to come.
    """
    now = clock or time.time
    if exchange.rank != 0:
        if exchange.rank in witnesses:
            _ask(exchange, now, patience)
        return {}
    deadline = time.monotonic() + limit

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    for rank in witnesses:
        for number in range(EXCHANGES):
            if not exchange.told(f"clock {number}", ranks=[rank], limit=left()):
                break
            exchange.answer(f"clock {number} of {rank}", now())
    told = exchange.told("skew", ranks=witnesses, limit=left())
    return {rank: Skew(*values) for rank, values in told.items()}


def _ask(exchange: Exchange, now: Callable[[], float], limit: float) -> None:
    found = []
    for number in range(EXCHANGES):
        before = now()
        exchange.tell(f"clock {number}", None)
        try:
            there = exchange.answered(f"clock {number} of {exchange.rank}", limit=limit)
        except TimeoutError:  # rank 0 waits for another, on whom the verdict will be
            return
        after = now()
        found.append(Skew((before + after) / 2 - there, abs(after - before) / 2))
    best = min(found, key=lambda skew: skew.error)
    exchange.tell("skew", [best.seconds, best.error])
