"""Small facts that ranks tell each other: sums over replicas, agreement, the largest value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.mappings import all_reduce


def mean_over_tokens(losses: list[Tensor], tokens: Tensor, groups: ProcessGroups) -> float:
    """Loss a token of the global batch, the same number on every rank.

    `losses` are sums over tokens on the last stage and empty elsewhere; `tokens` counts all
    replicas' unmasked tokens. NaN where there was no token.
    """
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for loss in losses:
        total += loss
    # Double precision has room for the sum of the float32 sums in any order.
    all_reduce(total, groups.data)
    all_reduce(total, groups.pipeline)
    return float(total / tokens) if float(tokens) else float("nan")


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if it is true on one."""
    value = torch.tensor(float(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value)


def largest(value: int, device: torch.device) -> tuple[int, int]:
    """The largest value of all ranks, and the first rank that has it."""
    values = [of_rank for (of_rank,) in of_all_ranks([value], device)]
    return max(values), values.index(max(values))


def of_all_ranks(values: Sequence[int], device: torch.device) -> list[list[int]]:
    """The values of all ranks, by rank; each has the same number of them."""
    own = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [each.tolist() for each in everyone]


def gather_texts(text: str | None) -> dict[int, str]:
    """What each rank has to say, by rank; ranks that say nothing are left out."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return {rank: said for rank, said in enumerate(texts) if said}


@contextmanager
def together(*kinds: type[Exception]) -> Iterator[None]:
    """Run a block that holds no collective call on all ranks, and leave it on all or on none.

    An error of one of the `kinds` on any rank is raised on every rank, with the texts of all ranks
    that had one, so that none goes on and waits for ever.
    """
    own: Exception | None = None
    try:
        yield
    except kinds as error:
        own = error
    said = gather_texts(None if own is None else str(own) or type(own).__name__)
    if not said:
        return
    texts = set(said.values())
    if own is not None and len(texts) == 1:
        raise own
    raise kinds[0]("; ".join(f"rank {rank}: {text}" for rank, text in said.items()))
