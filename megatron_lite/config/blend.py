"""The forms a corpus path may take: one prefix, or a blend of weighted prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence

_RULE = "must be a prefix, [prefix], or [weight, prefix, weight, prefix, ...]"


def parse_blend(path: str | Sequence[float | str]) -> tuple[tuple[float, str], ...]:
    """(weight, prefix) of each corpus, weights as written.

    >>> parse_blend("data/prose_text_document")
    ((1.0, 'data/prose_text_document'),)
    >>> parse_blend([0.7, "data/code", 0.3, "data/prose"])
    ((0.7, 'data/code'), (0.3, 'data/prose'))

    Raises:
        ValueError: another form, a weight that is not a finite number of at least 0, an empty
            prefix, or no weight above 0.
    """
    if isinstance(path, str):
        path = [path]
    if not isinstance(path, list | tuple) or not path:
        raise ValueError(_RULE)
    if len(path) == 1:
        return ((1.0, _prefix(path[0])),)
    if len(path) % 2:
        raise ValueError(f"{_RULE}; {len(path)} entries do not form pairs")
    pairs = zip(path[::2], path[1::2], strict=True)
    blend = tuple((_weight(weight), _prefix(prefix)) for weight, prefix in pairs)
    if not any(weight > 0 for weight, _ in blend):
        raise ValueError("must have a weight above 0")
    return blend


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_RULE}; {value!r} stands where a weight belongs")
    if not 0 <= value < math.inf:
        raise ValueError(f"{_RULE}; the weight {value} is not a finite number of at least 0")
    return float(value)


def _prefix(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{_RULE}; {value!r} stands where a prefix belongs")
    return value
