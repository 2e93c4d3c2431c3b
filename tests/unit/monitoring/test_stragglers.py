"""A rank's own work under a clock that the test moves, and which of all ranks is the slowest."""

from __future__ import annotations

import pytest

from megatron_lite.monitoring.stragglers import Slowest, WorkClock, Worked, slowest

F, B = ("F", 0), ("B", 0)


class Device:
    """Marks moments of a host clock; they come to pass up to `done`."""

    def __init__(self) -> None:
        self.now, self.done = 0.0, 1e9

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return mark <= self.done

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_waiting_and_work_are_kept_apart() -> None:
    device = Device()
    clock = WorkClock(device)
    for waits, acts, part in ((5.0, 1.0, F), (0.0, 2.0, F), (7.0, 3.0, B)):
        if waits:
            clock.wait()
            device.now += waits
        clock.begin(part)
        device.now += acts
    clock.pause()
    device.now += 100.0
    assert clock.lap() == Worked({F: 3.0, B: 3.0}, waited=12.0)
    assert clock.lap() == Worked()


def test_what_a_device_has_not_done_yet_counts_later() -> None:
    device = Device()
    clock = WorkClock(device)
    device.done = 3.0
    for _ in range(2):
        clock.begin(F)
        device.now += 2.0
        clock.pause()
    assert clock.lap().seconds == 2.0
    device.done = 9.0
    assert clock.lap().seconds == 2.0


@pytest.mark.parametrize(
    ("worked", "expected"),
    [
        ([2.0, 3.0, 2.0, 2.0], Slowest(1, 0.75, 1.5, worth_telling=True)),
        ([2.0, 2.4, 2.0, 2.0], Slowest(1, 0.6, 1.2, worth_telling=False)),
        ([0.1, 0.2], Slowest(1, 0.05, 2.0, worth_telling=False)),
        ([3.0], Slowest(0, 0.75, 1.0, worth_telling=False)),
        ([0.0, 0.0], Slowest(0, 0.0, 1.0, worth_telling=False)),
    ],
    ids=["clearly", "a-little", "of-no-weight", "alone", "nothing-measured"],
)
def test_the_slowest_of_all(worked: list[float], expected: Slowest) -> None:
    found = slowest(worked, 4.0)
    assert (found.rank, found.worth_telling) == (expected.rank, expected.worth_telling)
    assert (found.share, found.ratio) == pytest.approx((expected.share, expected.ratio))
