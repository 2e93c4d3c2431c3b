"""The groups of a job: an all-reduce over each, and who is in one that does not end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_lite.health.preflight import group_speed
from megatron_lite.health.preflight.comparison import (
    Reading,
    by_text,
    judge_groups,
    places,
    whole_groups,
)
from megatron_lite.health.preflight.exchange import Exchange
from megatron_lite.health.preflight.group_speed import Members, measure, time_limit
from megatron_lite.health.preflight.verdict import GRACE, Judge, PreflightFailed


def check_groups(
    judge: Judge,
    groups: Mapping[str, Members],
    *,
    device: torch.device,
    give_up: Callable[[PreflightFailed], Any],
) -> None:
    """All-reduce over each of the groups, by kind; those of one rank are passed over. Collective.

    PreflightFailed on all ranks where a sum is wrong or a collective fails. Where one does not end,
    `give_up` is called with that error from a thread; it must end the process.
    """
    exchange, beside, readings, error = judge.exchange, judge.exchange.beside(), [], ""
    for number, (kind, group) in enumerate(groups.items()):
        if len(group.ranks) == 1:
            continue
        exchange.tell("at", [number, kind, list(group.ranks)])
        try:
            with time_limit(group_speed.LIMIT, lambda: give_up(_hung(judge, beside))):
                readings.append(measure(kind, group, device))
        except RuntimeError as failure:
            error = f"the all-reduce over the {kind} group failed: {failure}"
            break
    group_speed.tidy(device)
    exchange.tell("readings", [[asdict(reading) for reading in readings], error])
    if judge.presides:
        _judge(judge, device)
    judge.settle("groups", group_speed.LIMIT + GRACE)


def _judge(judge: Judge, device: torch.device) -> None:
    """Rank 0: what all ranks have measured, and who has not come to an end."""
    record, told = judge.record, judge.exchange.told("readings", limit=group_speed.LIMIT)
    if missing := judge.silent(told):
        record.findings.faults.append(_where_it_hangs(judge, judge.exchange, missing))
    errors = {rank: [error] for rank, (_, error) in told.items() if error}
    record.findings.faults += by_text(errors, record.nodes)
    readings = {
        rank: [Reading(**{**one, "ranks": tuple(one["ranks"])}) for one in own]
        for rank, (own, _) in told.items()
    }
    record.readings = whole_groups(one for own in readings.values() for one in own)
    record.add(judge_groups(readings, record.nodes, jitter=group_speed.JITTER[device.type]))


def _hung(judge: Judge, exchange: Exchange) -> PreflightFailed:
    """What to say of an all-reduce that does not end; called in a thread of a rank in it."""
    if judge.presides:
        missing = judge.silent(exchange.told("readings", limit=0.0))  # this rank at least
        judge.record.findings.faults.append(_where_it_hangs(judge, exchange, missing))
        return PreflightFailed.of(judge.pronounce(exchange, "groups"), silence=True)
    try:
        return PreflightFailed.of(exchange.answered("groups", limit=GRACE))
    except TimeoutError as error:
        return PreflightFailed.of([f"an all-reduce does not end, and {error}"])


def _where_it_hangs(judge: Judge, exchange: Exchange, missing: Sequence[int]) -> str:
    """The group in which those of the missing ranks are that have come least far."""
    nodes, nowhere = judge.record.nodes, (-1, "", ())
    told = exchange.told("at", limit=0.0)
    at: dict[int, tuple[int, str, Sequence[int]]] = {
        rank: tuple(told.get(rank, nowhere)) for rank in missing
    }
    least = min(at.values(), key=lambda place: place[0])
    ranks = [rank for rank, place in at.items() if place == least]
    if least == nowhere:
        return f"{places(ranks, nodes)}: did not come to the first all-reduce"
    return (
        f"the all-reduce over the {least[1]} group of {places(least[2], nodes)} did not end within "
        f"{group_speed.LIMIT:g} s; waiting in it: {places(ranks, nodes)}"
    )
