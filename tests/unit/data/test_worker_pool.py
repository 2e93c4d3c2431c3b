"""Ordered answers from worker processes that may fail or die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data import worker_pool
from megatron_lite.data.errors import WorkerDiedError
from megatron_lite.data.worker_pool import WorkerPool


def _slow_square() -> Callable[[int], int]:
    def square(number: int) -> int:
        time.sleep(0.02 if number % 5 == 0 else 0)
        return number * number

    return square


def _fragile() -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if number == 4:
            os._exit(7)
        if number == 5:
            raise KeyError("five")
        return number

    return work


def test_answers_come_in_order_and_the_pool_can_be_used_again() -> None:
    with WorkerPool(_slow_square, workers=3) as pool:
        assert list(pool.map(range(40))) == [number * number for number in range(40)]
        assert list(pool.map([])) == []
        assert list(pool.map([9])) == [81]


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (3, WorkerDiedError, r"worker \d of 2 .* killed by SIGTERM"),
        (4, WorkerDiedError, "ended with exit code 7 while it worked on 4"),
        (5, RuntimeError, "KeyError: 'five'"),
    ],
)
def test_failures_are_told(item: int, error: type[Exception], message: str) -> None:
    with WorkerPool(_fragile, workers=2) as pool, pytest.raises(error, match=message):
        list(pool.map([item]))


def test_leaving_ends_all_processes() -> None:
    with WorkerPool(_own_pid, workers=2) as pool:
        pids = set(pool.map(range(20)))
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _own_pid() -> Callable[[int], int]:
    return lambda _: os.getpid()


def test_a_worker_never_runs_its_parents_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a signal that comes before its own are in place, which ends it nevertheless."""
    handled, serve = tmp_path / "handled", worker_pool._serve

    def hurried(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        serve(*arguments)

    monkeypatch.setattr(worker_pool, "_serve", hurried)
    before = signal.signal(signal.SIGTERM, lambda *_: handled.touch())
    try:
        with (
            WorkerPool(_own_pid, workers=1) as pool,
            pytest.raises(WorkerDiedError, match="killed by SIGTERM"),
        ):
            list(pool.map([1]))
        assert not handled.exists()
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(signal.SIGTERM, before)
