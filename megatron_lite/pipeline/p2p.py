"""Mailbox: the messages of a rank's runs of schedules, sent and received without blocking.

Receives are posted in each sender's order, so any order of use is safe; a rank waits only for the
message that its next action needs. Used by the executor, knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.mpu.groups import Group, ProcessGroups
from megatron_lite.pipeline.messages import Message


class Mailbox:
    """Messages between this pipeline rank and the others, all of one shape and dtype."""

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._empty = {"size": shape, "dtype": dtype, "device": device}
        self._expected: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._free: list[Tensor] = []
        """Buffers of earlier messages, for coming ones."""
        self._keep = 2 * groups.pipeline.size
        """Buffers that are kept from run to run: what a schedule needs that goes on backwards as
        soon as it can. More, as all micro-batches of GPipe, would lie idle in the meantime."""

    def expect(self, messages: Iterable[Message]) -> None:
        """Post the receives of `messages`, which are the next ones that their senders send."""
        for message in messages:
            tensor = self._free.pop() if self._free else self._buffer()
            group = _channel(self._groups, message)
            work = dist.irecv(tensor, src=group.ranks[message.src], group=group.handle)
            assert work is not None
            self._expected[message] = (work, tensor)

    def take(self, message: Message) -> Tensor:
        """Wait for a message that was expected; the tensor is the caller's until `release`."""
        work, tensor = self._expected.pop(message)
        work.wait()
        return tensor

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Give back what was taken, when nothing reads it any more."""
        self._free += [tensor.detach() for tensor in tensors]

    def _buffer(self) -> Tensor:
        return torch.empty(**self._empty)  # type: ignore[call-overload]

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending; the tensor must not change until it has arrived."""
        group = _channel(self._groups, message)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=group.ranks[message.dst], group=group.handle)
        assert work is not None
        self._sent[message] = (work, tensor)

    def forget(self, messages: Iterable[Message]) -> None:
        """Let go of what was sent and, as the caller knows, received: nothing waits."""
        for message in messages:
            work, _ = self._sent.pop(message)
            work.wait()  # gloo never says that a send is over before it is asked this way

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        self.forget(list(self._sent))
        del self._free[self._keep :]


def connect(groups: ProcessGroups, device: torch.device, pairs: Iterable[tuple[int, int]]) -> None:
    """Open the channels between `pairs` of pipeline ranks (src, dst) once, in one order on all.

    NCCL opens a channel at its first message and blocks until both sides are there; opened in the
    middle of a schedule, two ranks could wait for each other.
    """
    rank = groups.pipeline.rank
    token = torch.zeros(1, device=device)
    for src, dst in sorted(pairs):
        group = groups.downstream if src < dst else groups.upstream
        if rank == src:
            dist.send(token, dst=group.ranks[dst], group=group.handle)
        elif rank == dst:
            dist.recv(token, src=group.ranks[src], group=group.handle)


def _channel(groups: ProcessGroups, message: Message) -> Group:
    """One communicator for each direction, see ProcessGroups."""
    return groups.downstream if message.src < message.dst else groups.upstream
