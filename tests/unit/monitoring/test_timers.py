"""Time per iteration under a clock that the test moves."""

from __future__ import annotations

import pytest

from megatron_lite.monitoring.throughput import tokens_per_second
from megatron_lite.monitoring.timers import StepTimer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("log_interval", [1, 5])
def test_b54_two_second_steps_whatever_the_log_interval_and_saves(log_interval: int) -> None:
    """DP 2 x TP 2, micro 2, accumulation 3: 12 samples of 32 tokens a step; a save of 8 s."""
    clock = FakeClock()
    timer = StepTimer(clock)
    rates = []
    for iteration in range(1, 11):
        clock.now += 2.0
        if iteration == 3:
            with timer.apart("save"):
                clock.now += 8.0
        timer.step_done()
        if iteration == 7:
            with timer.apart("evaluation"):
                clock.now += 5.0
        if iteration % log_interval == 0:
            lap = timer.lap()
            assert lap.iterations == log_interval
            assert lap.seconds_per_iteration == 2.0
            samples = 12 * lap.iterations
            rates.append(tokens_per_second(samples=samples, seq_length=32, seconds=lap.seconds))
    assert rates == [192.0] * (10 // log_interval)
    assert [rate / 4 for rate in rates] == [48.0] * len(rates)
    assert timer.totals == {
        "train": 20.0,
        "save": 8.0,
        "load": 0.0,
        "evaluation": 5.0,
        "trace": 0.0,
    }


def test_time_between_steps_counts_as_training() -> None:
    clock = FakeClock()
    timer = StepTimer(clock)
    clock.now += 1.0
    timer.step_done()
    clock.now += 0.5
    assert timer.lap().seconds == 1.5


def test_waiting_for_data_is_part_of_training() -> None:
    clock = FakeClock()
    timer = StepTimer(clock)
    laps = []
    for _ in range(2):
        for seconds in (0.5, 0.25):
            with timer.waiting():
                clock.now += seconds
            clock.now += 1.0
            timer.step_done()
        laps.append(timer.lap())
    assert [(lap.seconds, lap.waited) for lap in laps] == [(2.75, 0.75)] * 2
    assert timer.totals["train"] == 5.5


def test_time_apart_is_booked_even_if_it_fails() -> None:
    clock = FakeClock()
    timer = StepTimer(clock)
    with pytest.raises(OSError, match="disk full"), timer.apart("save"):
        clock.now += 3.0
        raise OSError("disk full")
    clock.now += 2.0
    timer.step_done()
    assert timer.lap().seconds == 2.0
    assert timer.totals["save"] == 3.0


@pytest.mark.parametrize("lost", [0, 2])
def test_a_dropped_lap_is_in_no_other(lost: int) -> None:
    """Steps of 3 s are undone, which a load of 7 s does; then comes one of 2 s."""
    clock = FakeClock()
    timer = StepTimer(clock)
    for _ in range(lost):
        with timer.waiting():
            clock.now += 3.0
        timer.step_done()
    with timer.apart("load"):
        clock.now += 7.0
    timer.drop_lap()
    clock.now += 2.0
    timer.step_done()
    lap = timer.lap()
    assert (lap.seconds, lap.iterations, lap.waited) == (2.0, 1, 0.0)
    assert (timer.totals["train"], timer.totals["load"]) == (3.0 * lost + 2.0, 7.0)


def test_a_lap_without_iterations_is_refused() -> None:
    timer = StepTimer(FakeClock())
    timer.step_done()
    timer.lap()
    with pytest.raises(ValueError, match="no iteration has ended"):
        timer.lap()
