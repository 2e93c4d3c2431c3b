"""Mailbox: the messages of one run of a schedule, sent and received without blocking.

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
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def expect(self, messages: Iterable[Message]) -> None:
        """Post the receives of `messages`, which are the next ones that their senders send."""
        for message in messages:
            tensor = torch.empty(**self._empty)  # type: ignore[call-overload]
            group = _channel(self._groups, message)
            work = dist.irecv(tensor, src=group.ranks[message.src], group=group.handle)
            assert work is not None
            self._expected[message] = (work, tensor)

    def take(self, message: Message) -> Tensor:
        """Wait for a message that was expected; the caller owns the tensor."""
        work, tensor = self._expected.pop(message)
        work.wait()
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending; the tensor must not change until `flush`."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        group = _channel(self._groups, message)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=group.ranks[message.dst], group=group.handle)
        assert work is not None
        self._sent.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def connect(groups: ProcessGroups, device: torch.device) -> None:
    """Open every channel between pipeline neighbours once, in one order on all ranks.

    NCCL opens a channel at its first message and blocks until both sides are there; opened in the
    middle of a schedule, two ranks could wait for each other.
    """
    rank, last = groups.pipeline.rank, groups.pipeline.size - 1
    token = torch.zeros(1, device=device)
    for low in range(last):
        for group, src, dst in (
            (groups.downstream, low, low + 1),
            (groups.upstream, low + 1, low),
        ):
            if rank == src:
                dist.send(token, dst=group.ranks[dst], group=group.handle)
            elif rank == dst:
                dist.recv(token, src=group.ranks[src], group=group.handle)


def _channel(groups: ProcessGroups, message: Message) -> Group:
    """One communicator for each direction, see ProcessGroups."""
    return groups.downstream if message.src < message.dst else groups.upstream
