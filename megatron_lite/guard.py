"""Guard: what a run does about a step whose loss or gradients went wrong.

It sees every step, decides on all ranks alike, and counts. How a cause is found is forensics.py's,
how a run goes back rewinding.py's. Called by the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_lite.config.schema import RunConfig
from megatron_lite.engine.interface import Engine, StepOutcome
from megatron_lite.forensics import Forensics, Taken
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.reductions import any_rank, mean_over_tokens
from megatron_lite.numerics.spikes import spike_limit
from megatron_lite.progress import Progress


class TrainingStopped(Exception):
    """The run can't go on; the message says why and what to look at."""


@dataclass(frozen=True)
class Fault:
    """A step whose numbers went wrong."""

    event: Literal["nonfinite", "spike"]
    action: Literal["log", "skip", "rewind", "stop"]
    iteration: int
    samples: tuple[int, int]
    """[first, last) of the run's samples that it read."""
    story: str
    file: str | None = None
    """Where more is written."""

    def __str__(self) -> str:
        more = "" if self.file is None else f". More in {self.file}"
        return f"iteration {self.iteration}: {self.story}{more}"


@dataclass(frozen=True)
class Verdict:
    """What became of a step."""

    outcome: StepOutcome
    loss: float | None
    """A token's; None where nobody had to read it."""
    fault: Fault | None


@dataclass
class Guard:
    """One rank's watch over the numbers of a run; `step` is called by all ranks together."""

    config: RunConfig
    groups: ProcessGroups
    engine: Engine
    forensics: Forensics
    device: torch.device
    _incurable: int = 0
    """Skipped steps in a row that a lower loss scale can't cure."""

    def step(
        self, taken: Taken, losses: list[Tensor], tokens: Tensor, *, lr: float, progress: Progress
    ) -> Verdict:
        """The optimizer step after the backwards of `taken`, unless its loss forbids it.

        The loss is read before it only where training.loss_spike asks for that.
        """
        loss = spike = None
        if self.config.training.loss_spike is not None:
            loss = mean_over_tokens(losses, tokens, self.groups)
            spike = self._spike(taken, loss, progress)
        if spike is not None and spike.action != "log":
            self._incurable = 0
            return Verdict(self.engine.give_up_step(), loss, spike)
        outcome = self.engine.step(lr)
        if outcome.applied:
            self._incurable = 0
            return Verdict(outcome, loss, spike)
        if loss is None:
            loss = mean_over_tokens(losses, tokens, self.groups)
        return Verdict(outcome, loss, self._nonfinite(taken, losses, tokens, loss))

    def bad_loss_alone(self, taken: Taken, loss: float, tokens: Tensor) -> Fault | None:
        """The fault of a step that was applied, where its loss, once read, turns out not finite.

        Its gradients were finite, so there is nothing to run again: weights have changed.
        """
        action = self.config.training.on_nan
        if action == "skip" or not self._bad(loss, tokens):
            return None
        story = f"the loss is {loss}, although all gradients were finite and the update was made"
        return self._fault("nonfinite", action, taken, story)

    def _spike(self, taken: Taken, loss: float, progress: Progress) -> Fault | None:
        rule = self.config.training.loss_spike
        assert rule is not None
        recent = progress.recent_losses
        limit = spike_limit(recent, window=rule.window, threshold=rule.threshold)
        # An infinite loss is training.on_nan's.
        above = limit is not None and limit < loss < math.inf
        # A rank whose sums went another way must not go its own way.
        found = any_rank(above, self.device)
        if math.isfinite(loss):
            # Spikes too: a level that stays becomes the usual one, and skipping has an end.
            progress.recent_losses = [*recent, loss][-rule.window :]
        if not found:
            return None
        story = (
            f"loss {loss:.6g} is a spike: above {limit:.6g}, the median of the last {rule.window} "
            f"+ {rule.threshold:g} robust standard deviations"
        )
        return self._fault("spike", rule.action, taken, story)

    def _bad(self, loss: float, tokens: Tensor) -> bool:
        """Whether a loss is not finite on any rank; of no tokens it is NaN, and no fault."""
        return any_rank(not math.isfinite(loss) and bool(tokens), self.device)

    def _nonfinite(
        self, taken: Taken, losses: list[Tensor], tokens: Tensor, loss: float
    ) -> Fault | None:
        """Look for the cause of a skipped step, unless a lower loss scale is the cure."""
        precision, action = self.config.precision, self.config.training.on_nan
        adapts = precision.dtype == "fp16" and precision.loss_scale == "dynamic"
        bad_loss = self._bad(loss, tokens)
        if adapts and taken.loss_scale > precision.min_loss_scale and not bad_loss:
            self._incurable = 0
            return None
        self._incurable += 1
        what = "loss" if bad_loss else "gradients"
        facts = {"loss": loss, "loss_scale": taken.loss_scale, "not_finite": what}
        report = self.forensics.investigate(taken, losses, facts)
        times = f"{self._incurable} steps in a row" if self._incurable > 1 else "the step"
        scale = f"at loss scale {self.engine.loss_scale:g}"
        scale += ", the smallest allowed" if adapts and not bad_loss else ""
        story = f"{what} not finite in {times} {scale}. {report.story}"
        if action == "skip" and self._incurable >= precision.max_consecutive_nonfinite_steps:
            action = "stop"
            story += ". Lower optimizer.lr, look at the data of these iterations, or train in bf16"
        return self._fault("nonfinite", action, taken, story, report.file)

    def _fault(
        self,
        event: Literal["nonfinite", "spike"],
        action: Literal["log", "skip", "rewind", "stop"],
        taken: Taken,
        story: str,
        file: str | None = None,
    ) -> Fault:
        samples = (taken.first_sample, taken.end_sample)
        return Fault(event, action, taken.iteration, samples, story, file)
