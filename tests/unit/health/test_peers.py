"""How long a rank waits for the others before it leaves."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from threading import Timer

import pytest
import torch.distributed as dist

from megatron_lite.health.peers import Peers


def test_a_process_of_another_container_is_not_taken_for_one_that_has_ended() -> None:
    """On one machine under one name, but with numbers of its own."""
    store = dist.HashStore()
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = socket.gethostname() + os.readlink("/proc/self/ns/pid")
    for rank, place in ((0, here), (2, f"{socket.gethostname()}pid:[1]")):
        store.set(f"process/{rank}", f"{ended.pid} {place}")
    assert Peers(store, rank=1, world_size=3).gone() == [0]


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
