"""What counts as a fault of a step, with an engine that is only told of."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite import guard as module
from megatron_lite.engine.interface import StepOutcome
from megatron_lite.guard import Guard, Verdict
from megatron_lite.progress import Progress

TAKEN: Any = SimpleNamespace(iteration=9, first_sample=32, end_sample=36, loss_scale=1.0)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verdict]:
    """A step of one rank with a loss; its gradients are finite where `applied`."""
    monkeypatch.setattr(module, "any_rank", lambda flag, device: flag)

    def run(loss: float, *, applied: bool, tokens: float = 8.0, action: str = "stop") -> Verdict:
        monkeypatch.setattr(module, "mean_over_tokens", lambda *_: loss)
        training = SimpleNamespace(
            on_nan=action, loss_spike=SimpleNamespace(action="skip", window=3, threshold=10)
        )
        precision = SimpleNamespace(
            dtype="bf16", loss_scale=1.0, max_consecutive_nonfinite_steps=100
        )
        outcome = StepOutcome(applied, 1.0 if applied else None, 1.0)
        given_up = StepOutcome(False, None, 1.0)
        config: Any = SimpleNamespace(training=training, precision=precision)
        engine: Any = SimpleNamespace(
            step=lambda lr: outcome, give_up_step=lambda: given_up, loss_scale=1.0
        )
        found = SimpleNamespace(story="Nothing", file=None)
        forensics: Any = SimpleNamespace(investigate=lambda *_: found)
        groups: Any = None
        guard = Guard(config, groups, engine, forensics, torch.device("cpu"))
        progress = Progress(recent_losses=[1.0, 1.1, 1.2])
        seen = torch.tensor(tokens)
        verdict = guard.step(TAKEN, [], seen, lr=0.1, progress=progress)
        alone = guard.bad_loss_alone(TAKEN, loss, seen) if verdict.outcome.applied else None
        return Verdict(verdict.outcome, loss, verdict.fault or alone)

    return run


def test_a_spike_is_a_finite_loss(step: Callable[..., Verdict]) -> None:
    high = step(50.0, applied=True)
    assert high.fault is not None and high.fault.event == "spike" and not high.outcome.applied
    for applied in (False, True):
        infinite = step(math.inf, applied=applied)
        assert infinite.fault is not None and infinite.fault.event == "nonfinite"
        assert infinite.fault.action == "stop" and "loss" in infinite.fault.story


@pytest.mark.parametrize("action", ["stop", "rewind", "skip"])
def test_a_batch_without_tokens_is_no_fault(action: str, step: Callable[..., Verdict]) -> None:
    assert step(math.nan, applied=True, tokens=0.0, action=action).fault is None
    bad = step(math.nan, applied=False, tokens=0.0, action=action).fault
    assert bad is not None and bad.story.startswith("gradients not finite")
    if action != "skip":
        assert step(math.nan, applied=True, action=action).fault is not None
