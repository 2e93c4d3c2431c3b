"""Runs any schedule: takes what an action needs, computes, passes the result on.

It holds no schedule's name and no warm-up: the table says what comes next, messages.py says what
travels. How a forward or backward is computed is the caller's business, and so is a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.monitoring.profiler import phase
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.pipeline.actions import Action, Kind, Schedule
from megatron_lite.pipeline.causality import Clock, clocks
from megatron_lite.pipeline.messages import (
    Message,
    consumer,
    incoming,
    needs,
    produces,
    supplier,
)
from megatron_lite.pipeline.p2p import Mailbox

PHASES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weight gradients"}
"""What the actions are called in a profiler's trace."""
Root = Tensor | GradientEdge
"""Where a backward starts: a loss, or the place in the graph of an output that is sent and gone."""


class Compute(Protocol):
    """What the actions of a rank's stages mean; engines offer it."""

    def forward(self, stage: int, batch: Any, hidden: Tensor | None) -> Tensor:
        """Run a stage on a micro-batch; the last stage returns a 0-dim loss."""

    def backward(self, output: Root, gradient: Tensor) -> None:
        """Fill the gradients of parameters and of the stage's input."""

    def backward_input(self, output: Root, gradient: Tensor) -> Any:
        """The first half of a split backward; returns what the second half needs."""

    def backward_weight(self, waiting: Any) -> None:
        """The second half: the gradients of weights."""


Note = Callable[[Action | None, Message | None], None]
"""Told of each turn: an action awaits a message, it begins (None), all are done (None, None)."""


@dataclass(frozen=True)
class Step:
    """An action with its messages, and the receives to post before it runs."""

    action: Action
    expect: tuple[Message, ...]
    receive: Message | None
    arrived: tuple[Message, ...]
    """Of what this rank has sent: what has been received once `receive` is there."""
    send: Message | None


class Program:
    """One rank's row of a schedule, with everything that is known before it runs."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.steps = tuple(_steps(schedule, rank))
        last = schedule.num_stages - 1
        self.losses_of = tuple(
            step.action.micro_batch
            for step in self.steps
            if step.action.kind == "F" and step.action.stage == last
        )
        """The micro-batches whose losses this rank computes, in its order."""


def _steps(schedule: Schedule, rank: int) -> Iterator[Step]:
    actions, clock_of = schedule.actions[rank], clocks(schedule)
    needed = [needs(schedule, action) for action in actions]
    # The place of each needed message's supplier in all ranks' rows.
    known = [clock_of[giver] if giver else () for giver in _givers(schedule, actions, needed)]
    following = _next_receives(needed)
    queues = incoming(schedule, rank)
    places = {message: place for queue in queues.values() for place, message in enumerate(queue)}
    posted = dict.fromkeys(queues, 0)
    sent = _Sent()
    for i, action in enumerate(actions):
        posts: list[Message] = []
        for j in (i, following[i]):
            # The next receive is posted before this action computes, so that the message travels
            # meanwhile; further ahead would only hold memory. Not one that hangs on this very
            # action: on a GPU it would occupy the device and wait for it.
            if j is None or (j > i and known[j][rank] > i):
                continue
            if (message := needed[j]) is not None:
                first, last = posted[message.src], places[message]
                posts += queues[message.src][first : last + 1]
                posted[message.src] = max(first, last + 1)
        send = produces(schedule, action)
        yield Step(action, tuple(posts), needed[i], sent.received_before(known[i]), send)
        if send is not None:
            sent.add(send, clock_of[_taker(send)])


class _Sent:
    """A rank's messages of which it can't know yet that they have been received."""

    def __init__(self) -> None:
        self._to: dict[int, list[tuple[int, Message]]] = {}
        """By receiver, as heaps: the action in its row that takes the message is the key."""

    def add(self, message: Message, taken: Clock) -> None:
        """A message is sent, and taken at `taken`."""
        heappush(self._to.setdefault(message.dst, []), (taken[message.dst], message))

    def received_before(self, here: Clock) -> tuple[Message, ...]:
        """Let go of those that have been received where `here` has been reached."""
        found = []
        for dst, waiting in self._to.items() if here else ():
            while waiting and waiting[0][0] <= here[dst]:
                found.append(heappop(waiting)[1])
        return tuple(found)


def _givers(
    schedule: Schedule, actions: Sequence[Action], needed: Sequence[Message | None]
) -> list[Action | None]:
    """The action on another rank whose result each action awaits."""
    return [
        None if message is None else supplier(schedule, action)
        for action, message in zip(actions, needed, strict=True)
    ]


def _next_receives(needed: Sequence[Message | None]) -> list[int | None]:
    """For each action the next one behind it that awaits a message."""
    found: list[int | None] = [None] * len(needed)
    coming: int | None = None
    for i in range(len(needed) - 1, -1, -1):
        found[i] = coming
        coming = i if needed[i] is not None else coming
    return found


def _taker(message: Message) -> Action:
    """The action that uses a message."""
    return Action("F" if message.kind == "activation" else "B", message.stage, message.micro_batch)


class PipelineExecutor:
    """Executes programs on this rank's stages."""

    def __init__(
        self,
        groups: ProcessGroups,
        compute: Compute,
        *,
        dtype: torch.dtype,
        device: torch.device,
        note: Note = lambda action, message: None,
    ) -> None:
        self._groups, self._compute, self._note = groups, compute, note
        self._dtype, self._device = dtype, device
        self._mailboxes: dict[tuple[int, ...], Mailbox] = {}
        self.peak_activations = 0
        """Of the last run: the most (stage, micro-batch) pairs between forward and backward."""

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
        mailbox = self._mailbox(hidden_shape)
        run = _Run(self, mailbox, program.schedule, micro_batches, loss_gradient)
        with torch.set_grad_enabled(not program.schedule.forward_only):
            for step in program.steps:
                run.do(step)
        self._note(None, None)
        mailbox.flush()
        self.peak_activations = run.peak
        return run.losses

    def computing(self, compute: Compute) -> PipelineExecutor:
        """An executor with the same channels that gives its actions another meaning."""
        other = copy(self)
        other._compute = compute
        return other

    def _mailbox(self, shape: tuple[int, ...]) -> Mailbox:
        """The mailbox for tensors of a shape, kept from run to run with its buffers."""
        if shape not in self._mailboxes:
            self._mailboxes[shape] = Mailbox(
                self._groups, shape=shape, dtype=self._dtype, device=self._device
            )
        return self._mailboxes[shape]


@dataclass(frozen=True)
class _Alive:
    """What a forward leaves for its backward."""

    hidden: Tensor | None
    received: bool
    """Whether `hidden` lies in a buffer of the mailbox."""
    root: Root


class _Run:
    """What lives during one run: the values that wait for their action."""

    def __init__(
        self,
        executor: PipelineExecutor,
        mailbox: Mailbox,
        schedule: Schedule,
        micro_batches: Sequence[Any],
        loss_gradient: Tensor | None,
    ) -> None:
        self.compute, self.note = executor._compute, executor._note
        self.mailbox, self.schedule = mailbox, schedule
        self.micro_batches, self.loss_gradient = micro_batches, loss_gradient
        self.handed_over: dict[Action, Tensor] = {}
        self.alive: dict[tuple[int, int], _Alive] = {}
        self.waiting: dict[tuple[int, int], tuple[Any, list[Tensor]]] = {}
        """What second halves of backwards need, and the buffers in which that may lie."""
        self.losses: list[Tensor] = []
        self.peak = 0

    def do(self, step: Step) -> None:
        """Post what comes soon, wait for what this action takes, compute, pass the result on."""
        self.mailbox.expect(step.expect)
        action, received = step.action, step.receive is not None
        if step.receive is None:
            value = self.handed_over.pop(action, None)
        else:
            self.note(action, step.receive)
            value = self.mailbox.take(step.receive)
            self.mailbox.forget(step.arrived)
        self.note(action, None)
        with phase(PHASES[action.kind]):
            result = self._work(action, value, received=received)
        if step.send is not None:
            assert result is not None
            self.mailbox.send(step.send, result)
        elif (taker := consumer(self.schedule, action)) is not None:
            assert result is not None
            self.handed_over[taker] = result

    def _work(self, action: Action, value: Tensor | None, *, received: bool) -> Tensor | None:
        if action.kind == "F":
            return self._forward(action, value, received=received)
        if action.kind == "B":
            return self._backward(action, value, received=received)
        self._backward_weight(action)
        return None

    def _forward(self, action: Action, hidden: Tensor | None, *, received: bool) -> Tensor:
        training = not self.schedule.forward_only
        if hidden is not None and training:
            hidden.requires_grad_()
        batch = self.micro_batches[action.micro_batch]
        output = self.compute.forward(action.stage, batch, hidden)
        is_loss = action.stage == self.schedule.num_stages - 1
        if training:
            # Of an output that is sent only its place in the graph stays: its memory goes when it
            # has left.
            root = output if is_loss else get_gradient_edge(output)
            self.alive[action.stage, action.micro_batch] = _Alive(hidden, received, root)
            self.peak = max(self.peak, len(self.alive))
        elif received and hidden is not None and not _same(hidden, output):
            self.mailbox.release([hidden])
        if is_loss:
            self.losses.append(output.detach())
        return output.detach()

    def _backward(
        self, action: Action, gradient: Tensor | None, *, received: bool
    ) -> Tensor | None:
        key = (action.stage, action.micro_batch)
        alive = self.alive.pop(key)
        weight = self.loss_gradient if gradient is None else gradient
        assert weight is not None, "a table with backward actions needs a loss gradient"
        waiting = None
        if self.schedule.split_backward:
            waiting = self.compute.backward_input(alive.root, weight)
        else:
            self.compute.backward(alive.root, weight)
        result = None if alive.hidden is None else alive.hidden.grad
        taken = [weight] if received else []
        if alive.received and alive.hidden is not None:
            taken.append(alive.hidden)
        # A stage that passes a gradient on as it is leaves its result in the buffer.
        buffers = [buffer for buffer in taken if result is None or not _same(buffer, result)]
        if self.schedule.split_backward:
            self.waiting[key] = waiting, buffers
        else:
            self.mailbox.release(buffers)
        return result

    def _backward_weight(self, action: Action) -> None:
        waiting, buffers = self.waiting.pop((action.stage, action.micro_batch))
        self.compute.backward_weight(waiting)
        self.mailbox.release(buffers)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
