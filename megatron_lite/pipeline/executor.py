"""Runs any schedule: takes what an action needs, computes, passes the result on.

It holds no schedule's name and no warm-up: the table says what comes next, messages.py says what
travels. How a forward or backward is computed is the caller's business, and so is a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.messages import Message, consumer, incoming, needs, produces
from megatron_lite.pipeline.p2p import Mailbox

Forward = Callable[[int, Any, Tensor | None], Tensor]
"""(stage, micro-batch, input or None) → output; the last stage's output is a 0-dim loss."""
Backward = Callable[[Tensor, Tensor], None]
"""(output of a forward, gradient of it): fills the gradients of parameters and of the input."""

Note = Callable[[Action | None, Message | None], None]
"""Told of each turn: an action awaits a message, it begins (None), all are done (None, None)."""


@dataclass(frozen=True)
class Step:
    """An action with its messages, and the receives to post before it runs."""

    action: Action
    expect: tuple[Message, ...]
    receive: Message | None
    send: Message | None


class Program:
    """One rank's row of a schedule, with everything that is known before it runs."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.steps = tuple(_steps(schedule, rank))


def _steps(schedule: Schedule, rank: int) -> list[Step]:
    actions = schedule.actions[rank]
    queues = {src: list(messages) for src, messages in incoming(schedule, rank).items()}
    steps = []
    for i, action in enumerate(actions):
        # The receive for the following action is posted before this one computes, so that the
        # message travels meanwhile; further ahead would only hold memory.
        posts: list[Message] = []
        for ahead in actions[i : i + 2]:
            message = needs(schedule, ahead)
            while message is not None and message in queues[message.src]:
                posts.append(queues[message.src].pop(0))
        steps.append(
            Step(action, tuple(posts), needs(schedule, action), produces(schedule, action))
        )
    return steps


class PipelineExecutor:
    """Executes programs on this rank's stages."""

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        forward: Forward,
        backward: Backward,
        dtype: torch.dtype,
        device: torch.device,
        note: Note = lambda action, message: None,
    ) -> None:
        self._groups = groups
        self._forward, self._backward, self._note = forward, backward, note
        self._dtype, self._device = dtype, device

    def run(
        self,
        program: Program,
        micro_batches: Sequence[Any],
        *,
        hidden_shape: tuple[int, ...],
        loss_gradient: Tensor | None = None,
    ) -> list[Tensor]:
        """Run one table; returns the losses (0-dim, detached) of the last stage's micro-batches, in
        the order in which the table runs their forwards.

        `hidden_shape` is the shape of every tensor between stages, `loss_gradient` the 0-dim weight
        with which each loss enters the backward (needed unless the table is forward only). Ranks
        without the last stage return [].
        """
        run = _Run(self, program, micro_batches, loss_gradient)
        run.mailbox = Mailbox(
            self._groups, shape=hidden_shape, dtype=self._dtype, device=self._device
        )
        with torch.set_grad_enabled(not program.schedule.forward_only):
            for step in program.steps:
                run.do(step)
        self._note(None, None)
        run.mailbox.flush()
        return run.losses


class _Run:
    """What lives during one run: the values that wait for their action."""

    mailbox: Mailbox

    def __init__(
        self,
        executor: PipelineExecutor,
        program: Program,
        micro_batches: Sequence[Any],
        loss_gradient: Tensor | None,
    ) -> None:
        self.executor, self.schedule = executor, program.schedule
        self.micro_batches, self.loss_gradient = micro_batches, loss_gradient
        self.handed_over: dict[Action, Tensor] = {}
        self.alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.losses: list[Tensor] = []

    def do(self, step: Step) -> None:
        self.mailbox.expect(step.expect)
        value: Tensor | None
        if step.receive is not None:
            self.executor._note(step.action, step.receive)
            value = self.mailbox.take(step.receive)
        else:
            value = self.handed_over.pop(step.action, None)
        self.executor._note(step.action, None)
        work = self._run_forward if step.action.kind == "F" else self._run_backward
        result = work(step.action, value)
        if step.send is not None:
            assert result is not None
            self.mailbox.send(step.send, result)
        elif (taker := consumer(self.schedule, step.action)) is not None:
            assert result is not None
            self.handed_over[taker] = result

    def _run_forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        training = not self.schedule.forward_only
        if hidden is not None and training:
            hidden.requires_grad_()
        batch = self.micro_batches[action.micro_batch]
        output = self.executor._forward(action.stage, batch, hidden)
        if training:
            self.alive[action.stage, action.micro_batch] = (hidden, output)
        if action.stage == self.schedule.num_stages - 1:
            self.losses.append(output.detach())
        return output.detach()

    def _run_backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        hidden, output = self.alive.pop((action.stage, action.micro_batch))
        if gradient is None:
            gradient = self.loss_gradient
        assert gradient is not None, "a table with backward actions needs a loss gradient"
        self.executor._backward(output, gradient)
        return None if hidden is None else hidden.grad
