"""Arrays between two processes: in shared memory while there is room, else with the message."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_lite.data import channel as module
from megatron_lite.data.channel import Channel

SIZES = [0, 1, 40_000, 70_000, 5_000, 100_000, 250_000, 30_000, 90_000, 10]


def _messages() -> list[dict[str, Any]]:
    numbers = np.random.default_rng(0)
    return [
        {"n": n, "tokens": numbers.integers(0, 60_000, size, dtype=np.uint16), "more": [b"x" * n]}
        for n, size in enumerate(SIZES * 4)
    ]


def _answer(channel: Channel) -> None:
    for message in _messages():
        channel.receive()
        channel.send(message)


@pytest.mark.parametrize("kept", [1, 3, 40])
def test_arrays_arrive_whole_while_others_are_kept(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RING_BYTES", 400_000)
    ours, theirs = Channel.pair()
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs,))
    process.start()
    theirs.close()
    held: list[tuple[Any, Any, Callable[[], None]]] = []
    for wanted in _messages():
        ours.send("next")
        got, let_go = ours.receive()
        held.append((wanted, got, let_go))
        if len(held) == kept:
            for want, message, _ in held:
                assert (message["n"], message["more"]) == (want["n"], want["more"])
                assert np.array_equal(message["tokens"], want["tokens"])
            held.pop(0)[2]()
    process.join(timeout=30)
    assert process.exitcode == 0
    with pytest.raises(EOFError):
        ours.receive()


def test_a_full_ring_takes_again_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RING_BYTES", 100)
    ring = module._Ring()
    data = memoryview(bytes(range(40)))
    first, second = ring.put(data), ring.put(data)
    assert first == (0, 40, 40) and second == (40, 40, 80)
    assert ring.put(data) is None
    ring.give_back(40)
    assert ring.put(data) == (0, 40, 140)  # past the 20 bytes at the end, which are too few
    assert ring.put(data) is None
    ring.give_back(140)
    assert ring.put(data) == (40, 40, 180)
    assert bytes(ring.get(40, 40)) == bytes(data)
