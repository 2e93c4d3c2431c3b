"""What the rules share: their type, and the arithmetic of the nearest legal value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron_lite.config import batch
from megatron_lite.config.draft import Absent
from megatron_lite.config.errors import Problem, show
from megatron_lite.config.fields import Section
from megatron_lite.config.schema import RunConfig

Rule = Callable[[RunConfig], Iterator[Problem]]
"""Yields the faults it finds. It is handed a draft: reading a faulty field raises `Absent` and ends
the rule."""

WorldRule = Callable[[RunConfig, int], Iterator[Problem]]
"""A rule that also needs the world size."""


def data_parallel_size(cfg: RunConfig, world_size: int) -> int:
    """Copies of the model; Absent where the world size does not give a whole number of them."""
    try:
        return batch.data_parallel_size(world_size, cfg.parallel)
    except ValueError:
        raise Absent("data-parallel size") from None


def divisors(number: int) -> list[int]:
    """Every divisor up to 4096, smallest first: `divisors(12)` is `[1, 2, 3, 4, 6, 12]`."""
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0]


def choices(allowed: Iterable[int], value: int) -> str:
    """All allowed values where they are few, else the nearest below and above `value`."""
    allowed = sorted(allowed)
    if len(allowed) > 8:
        below = [a for a in allowed if a < value]
        above = [a for a in allowed if a > value]
        allowed = below[-1:] + above[:1]
    *rest, last = map(str, allowed)
    return f"use {', '.join(rest)} or {last}" if rest else f"use {last}"


def nearest_multiples(value: int, of: int) -> str:
    """`nearest_multiples(65, 8)` is `64 or 72`; zero is no choice."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def without_effect(
    section: Any, defaults: type[Section], names: Iterable[str], path: str, why: str
) -> Iterator[Problem]:
    """A problem for each field of `names` that is set although nothing would read it."""
    for name in names:
        default = defaults.model_fields[name].default
        try:
            value = getattr(section, name)
        except Absent:
            continue
        if value != default:
            suggestion = f"leave it out (default {show(default)})"
            yield Problem(f"{path}.{name}", value, f"has no effect {why}", suggestion)
