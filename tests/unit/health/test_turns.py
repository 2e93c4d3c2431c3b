"""Who looks for the rank that hangs, and when."""

from __future__ import annotations

from megatron_lite.health.watchdog import GRACE
from megatron_lite.life import EXAMINERS, turn


def test_few_ranks_look_and_all_before_collectives_give_up() -> None:
    assert [turn(rank, 4) < 1.0 for rank in range(4)] == [True] * 4
    turns = [turn(rank, 4096) for rank in range(4096)]
    assert sum(seconds <= 5.0 for seconds in turns) == EXAMINERS
    assert max(turns) < GRACE / 2
