"""A GPU's own work, measured without waiting for it."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.monitoring.stragglers import DeviceStopwatch, WorkClock

pytestmark = pytest.mark.gpu


def test_time_of_the_device_is_counted_when_it_is_over() -> None:
    clock = WorkClock(DeviceStopwatch())
    clock.begin(("F", 0))
    torch.cuda._sleep(500_000_000)  # cycles: some tenths of a second
    clock.pause()
    assert clock.lap().seconds == 0.0, "the host did not wait"
    torch.cuda.synchronize()
    assert 0.05 < clock.lap().seconds < 5.0
