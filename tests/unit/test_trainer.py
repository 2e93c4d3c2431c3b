"""How a trainer leaves its loop, shown on the loop alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.guard import TrainingStopped
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.trainer import Trainer


def raises(error: Exception) -> Any:
    def act() -> None:
        raise error

    return act


def test_a_save_that_fails_as_training_stops_does_not_replace_the_reason() -> None:
    stopping = SimpleNamespace(
        _fit=raises(TrainingStopped("the loss is nan")),
        saver=SimpleNamespace(finish=raises(CheckpointError("no space left"))),
        heartbeat=Heartbeat(),
        profiler=SimpleNamespace(stop=lambda: None, write=lambda: None),
        end_trace=lambda: None,
    )
    told = r"the loss is nan\. The save on its way failed: no space left"
    with pytest.raises(TrainingStopped, match=told):
        Trainer.fit(cast(Trainer, stopping))
    assert stopping.heartbeat.phase == "save"
