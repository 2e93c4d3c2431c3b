"""Which tensors travel between ranks, derived from a schedule; no schedule states it itself.

Pure bookkeeping, sends nothing. The executor posts its receives from one sender in that sender's
order and waits for the message that an action needs, so it knows neither schedules nor warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lite.pipeline.actions import Action, Schedule

MessageKind = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor from rank `src` to rank `dst`, used by `dst` on `stage` for `micro_batch`.

    An activation is the output of stage - 1 and feeds the forward of `stage`; a gradient is that
    of the input of stage + 1 and feeds the backward of `stage`.
    """

    kind: MessageKind
    stage: int
    micro_batch: int
    src: int
    dst: int

    def __str__(self) -> str:
        return (
            f"{self.kind} for stage {self.stage}, micro-batch {self.micro_batch}"
            f" (rank {self.src} to rank {self.dst})"
        )


def supplier(schedule: Schedule, action: Action) -> Action | None:
    """The action on a neighbouring stage whose result `action` takes in, on whatever rank.

    None for the first stage's forward (it reads the data), the last stage's backward (it starts
    from the loss) and for W, which only continues its own stage's B.
    """
    stage = action.stage - 1 if action.kind == "F" else action.stage + 1
    if action.kind == "W" or not 0 <= stage < schedule.num_stages:
        return None
    return Action(action.kind, stage, action.micro_batch)


def consumer(schedule: Schedule, action: Action) -> Action | None:
    """The action on a neighbouring stage that takes in the result of `action`, on whatever rank.

    None for the last stage's forward (it ends in the loss), the first stage's backward, and W.
    """
    stage = action.stage + 1 if action.kind == "F" else action.stage - 1
    if action.kind == "W" or not 0 <= stage < schedule.num_stages:
        return None
    return Action(action.kind, stage, action.micro_batch)


def needs(schedule: Schedule, action: Action) -> Message | None:
    """The message that must have arrived before `action` runs.

    None where there is no supplier, and where the supplier is on the same rank (a local hand-over).
    """
    if supplier(schedule, action) is None:
        return None
    return _message(schedule, action)


def produces(schedule: Schedule, action: Action) -> Message | None:
    """The message that must be sent after `action` ran; None as in `needs`."""
    taker = consumer(schedule, action)
    return None if taker is None else _message(schedule, taker)


def channels(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """For every ordered pair of ranks (src, dst) that talk: the messages in the sender's order."""
    found: dict[tuple[int, int], list[Message]] = {}
    for rank_actions in schedule.actions:
        for action in rank_actions:
            message = produces(schedule, action)
            if message is not None:
                found.setdefault((message.src, message.dst), []).append(message)
    return {pair: tuple(messages) for pair, messages in found.items()}


def incoming(schedule: Schedule, rank: int) -> dict[int, tuple[Message, ...]]:
    """For every sender to `rank`: the messages to receive, in the order in which it sends them."""
    return {src: sent for (src, dst), sent in channels(schedule).items() if dst == rank}


def _message(schedule: Schedule, taker: Action) -> Message | None:
    """The message that feeds `taker`, which must have a supplier; None on one and the same rank."""
    giver = supplier(schedule, taker)
    assert giver is not None
    src = schedule.rank_of(giver.stage, giver.micro_batch)
    dst = schedule.rank_of(taker.stage, taker.micro_batch)
    if src == dst:
        return None
    kind: MessageKind = "activation" if taker.kind == "F" else "gradient"
    return Message(kind, taker.stage, taker.micro_batch, src, dst)
