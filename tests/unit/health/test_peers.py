"""How long a rank waits for the others before it leaves."""

from __future__ import annotations

import time
from threading import Timer

import pytest
import torch.distributed as dist

from megatron_lite.health.peers import Peers


@pytest.mark.parametrize(
    ("rank_0_after", "others", "waits"),
    [
        (0.5, [0, 1], (0.4, 1.4)),  # longer than for the others
        (0.0, [0, 1], (0.0, 1.4)),  # rank 2 never leaves
        (None, [1], (1.5, 9.0)),
    ],
)
def test_a_rank_waits_longer_for_the_one_that_speaks_for_all(
    rank_0_after: float | None, others: list[int], waits: tuple[float, float]
) -> None:
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(f"process/{rank}", "1 elsewhere")
    peers = Peers(store, rank=1, world_size=3)
    if rank_0_after is not None:
        Timer(rank_0_after, store.set, ["leaving/0", ""]).start()
    began = time.monotonic()
    assert peers.leave(patience=0.1, for_rank_0=1.5) == others
    assert waits[0] <= time.monotonic() - began < waits[1]
