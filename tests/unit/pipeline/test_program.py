"""What a rank posts early and lets go of, against dependencies that are followed one by one."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.executor import Program
from megatron_lite.pipeline.messages import Message, supplier
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule
from tests.random_tables import random_table


def tables() -> list[Schedule]:
    named = [
        build_schedule(
            name, num_ranks=4, num_microbatches=8, virtual=2 if name == "interleaved" else None
        )
        for name in SCHEDULES
    ]
    return named + [random_table(seed, 3) for seed in range(12)]


def depends(schedule: Schedule, action: Action) -> set[Action]:
    """Everything that must have ended before `action` begins, and itself."""
    before: dict[Action, Action] = {}
    for row in schedule.actions:
        before |= dict(zip(row[1:], row, strict=False))

    @cache
    def closure(one: Action) -> frozenset[Action]:
        parts = [before.get(one), supplier(schedule, one)]
        found = frozenset({one})
        return found.union(*(closure(part) for part in parts if part is not None))

    return set(closure(action))


def taker(message: Message) -> Action:
    kind = "F" if message.kind == "activation" else "B"
    return Action(kind, message.stage, message.micro_batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", tables(), ids=lambda schedule: schedule.name)
def test_no_receive_is_posted_that_hangs_on_the_action_it_is_posted_before(
    schedule: Schedule,
) -> None:
    """On a GPU a receive occupies the device until its message comes."""
    early = 0
    for rank in range(schedule.num_ranks):
        posted: list[Message] = []
        for step in Program(schedule, rank).steps:
            for message in step.expect:
                giver = supplier(schedule, taker(message))
                assert giver is not None
                if message != step.receive:
                    early += 1
                    assert step.action not in depends(schedule, giver)
            posted += step.expect
            assert step.receive is None or step.receive in posted
    if not schedule.name.startswith("random"):
        assert early > 0, "messages travel while ranks compute"


@pytest.mark.parametrize("schedule", tables(), ids=lambda schedule: schedule.name)
def test_what_is_let_go_has_been_received(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        under_way: list[Message] = []
        for step in Program(schedule, rank).steps:
            if step.arrived:
                giver = supplier(schedule, step.action)
                assert giver is not None
                known = depends(schedule, giver)
                assert all(taker(message) in known for message in step.arrived)
                under_way = [message for message in under_way if message not in step.arrived]
            under_way += [] if step.send is None else [step.send]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera", "zb-h1", "zbv", "dualpipev"])
def test_a_rank_keeps_as_few_messages_of_many_micro_batches_as_of_few(name: str) -> None:
    most = []
    for count in (16, 48):
        schedule = build_schedule(
            name, num_ranks=4, num_microbatches=count, virtual=2 if name == "interleaved" else None
        )
        kept = 0
        for rank in range(4):
            under_way = 0
            for step in Program(schedule, rank).steps:
                under_way -= len(step.arrived)
                under_way += step.send is not None
                kept = max(kept, under_way)
        most.append(kept)
    assert most[0] == most[1] < 24


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_a_program_of_many_micro_batches_compares_no_message_with_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of them a run would take minutes to begin."""
    schedule = build_schedule(name, num_ranks=4, num_microbatches=64)
    calls, equal = 0, Message.__eq__

    def counting(one: Message, other: object) -> bool:
        nonlocal calls
        calls += 1
        return equal(one, other)

    monkeypatch.setattr(Message, "__eq__", counting)
    steps = Program(schedule, 1).steps
    assert calls < 4 * len(steps)
