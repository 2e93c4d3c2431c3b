"""What travels between ranks: derived once from the table, in the sender's order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.messages import Message, channels, incoming, needs, produces
from megatron_lite.pipeline.schedules import build_schedule, forward_only


def test_neighbours_exchange_activations_and_gradients() -> None:
    schedule = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    assert channels(schedule) == {
        (0, 1): (Message("activation", 1, 0, 0, 1), Message("activation", 1, 1, 0, 1)),
        (1, 0): (Message("gradient", 0, 0, 1, 0), Message("gradient", 0, 1, 1, 0)),
    }


def test_ends_of_the_pipeline_exchange_nothing() -> None:
    schedule = build_schedule("gpipe", num_stages=3, num_microbatches=1)
    assert needs(schedule, Action("F", 0, 0)) is None
    assert needs(schedule, Action("B", 2, 0)) is None
    assert produces(schedule, Action("F", 2, 0)) is None
    assert produces(schedule, Action("B", 0, 0)) is None


def test_what_one_produces_the_neighbour_needs() -> None:
    schedule = build_schedule("gpipe", num_stages=3, num_microbatches=2)
    forward = produces(schedule, Action("F", 0, 1))
    assert forward == needs(schedule, Action("F", 1, 1)) == Message("activation", 1, 1, 0, 1)
    backward = produces(schedule, Action("B", 2, 1))
    assert backward == needs(schedule, Action("B", 1, 1)) == Message("gradient", 1, 1, 2, 1)


def test_one_stage_has_no_channels() -> None:
    assert channels(build_schedule("1f1b", num_stages=1, num_microbatches=3)) == {}


def test_incoming_keeps_the_order_of_each_sender() -> None:
    schedule = build_schedule("1f1b", num_stages=3, num_microbatches=2)
    received = incoming(schedule, 1)
    assert set(received) == {0, 2}
    assert [str(m) for m in received[2]] == [
        "gradient for stage 1, micro-batch 0 (rank 2 to rank 1)",
        "gradient for stage 1, micro-batch 1 (rank 2 to rank 1)",
    ]


def test_two_stages_on_one_rank_hand_over_without_a_message() -> None:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1: a V of one micro-batch."""
    schedule = Schedule.one_way(
        "v",
        placement=(0, 1, 1, 0),
        num_microbatches=1,
        actions=(
            (Action("F", 0, 0), Action("F", 3, 0), Action("B", 3, 0), Action("B", 0, 0)),
            (Action("F", 1, 0), Action("F", 2, 0), Action("B", 2, 0), Action("B", 1, 0)),
        ),
    )
    assert needs(schedule, Action("F", 2, 0)) is None
    assert produces(schedule, Action("F", 1, 0)) is None
    assert channels(schedule) == {
        (0, 1): (Message("activation", 1, 0, 0, 1), Message("gradient", 2, 0, 0, 1)),
        (1, 0): (Message("activation", 3, 0, 1, 0), Message("gradient", 0, 0, 1, 0)),
    }


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "forward-only"]),
    p=st.integers(1, 8),
    m=st.integers(1, 16),
)
def test_every_message_is_sent_once_and_needed_once(name: str, p: int, m: int) -> None:
    if name == "forward-only":
        schedule = forward_only(range(p), m)
    else:
        schedule = build_schedule(name, num_stages=p, num_microbatches=m)
    sent = [message for messages in channels(schedule).values() for message in messages]
    needed = [needs(schedule, action) for row in schedule.actions for action in row]
    wanted = [message for message in needed if message is not None]
    assert len(sent) == len(set(sent)) == len(schedule.kinds) * (p - 1) * m
    assert set(sent) == set(wanted)
    assert len(wanted) == len(sent)
