"""What travels between ranks: derived once from the table, in the sender's order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.messages import (
    Message,
    channels,
    consumer,
    incoming,
    needs,
    produces,
    supplier,
)
from megatron_lite.pipeline.schedules import build_schedule
from tests.random_tables import random_table


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


def test_each_direction_has_its_own_way() -> None:
    schedule = build_schedule("chimera", num_ranks=2, num_microbatches=2)
    assert needs(schedule, Action("F", 1, 0)) == Message("activation", 1, 0, 0, 1)
    assert needs(schedule, Action("F", 1, 1)) == Message("activation", 1, 1, 1, 0)


def test_the_gradient_of_weights_stays_where_it_is() -> None:
    schedule = build_schedule("zb-h1", num_ranks=3, num_microbatches=1)
    weights = Action("W", 1, 0)
    assert needs(schedule, weights) is produces(schedule, weights) is None
    assert supplier(schedule, weights) is consumer(schedule, weights) is None


@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_every_message_is_sent_once_and_needed_once(ranks: int, seed: int) -> None:
    schedule = random_table(seed, ranks)
    for (src, dst), sent in channels(schedule).items():
        assert incoming(schedule, dst)[src] == sent
        made = [produces(schedule, action) for action in schedule.actions[src]]
        assert [message for message in made if message is not None and message.dst == dst] == list(
            sent
        )
        taken = [needs(schedule, action) for action in schedule.actions[dst]]
        wanted = [message for message in taken if message is not None and message.src == src]
        assert len(set(sent)) == len(sent) == len(wanted)
        assert set(sent) == set(wanted)
    hops = sum(
        schedule.rank_of(stage, i) != schedule.rank_of(stage + 1, i)
        for stage in range(schedule.num_stages - 1)
        for i in range(schedule.num_microbatches)
    )
    assert sum(map(len, channels(schedule).values())) == 2 * hops
