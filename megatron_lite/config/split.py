"""The text of `data.split`: relative sizes of the training, validation and test parts."""

from __future__ import annotations

import math

_RULE = 'must be one to three numbers such as "969,30,1"'


def parse_split(text: str) -> tuple[float, float, float]:
    """The three parts as fractions that sum to 1; parts left out are empty.

    >>> parse_split("8, 1, 1")
    (0.8, 0.1, 0.1)
    >>> parse_split("100")
    (1.0, 0.0, 0.0)

    Raises:
        ValueError: not text, more than three fields, a field that is no finite number or is
            negative, or all zero.
    """
    if not isinstance(text, str):
        raise ValueError(f"{_RULE}, written as text")
    fields = text.split(",")
    if len(fields) > 3:
        raise ValueError(f"{_RULE}; {len(fields)} fields were given")
    sizes = [_size(number, field.strip()) for number, field in enumerate(fields, start=1)]
    total = sum(sizes)
    if total == 0:
        raise ValueError("must have a part above 0")
    if not math.isfinite(total):
        raise ValueError(f"{_RULE}; their sum is not finite")
    train, valid, test = [*(size / total for size in sizes), 0.0, 0.0][:3]
    return train, valid, test


def _size(number: int, field: str) -> float:
    try:
        size = float(field.replace("_", "?"))  # float() would take 1_0 for 10
    except ValueError:
        raise ValueError(f'{_RULE}; field {number}, "{field}", is no number') from None
    if not math.isfinite(size):
        raise ValueError(f'{_RULE}; field {number}, "{field}", is not finite')
    if size < 0:
        raise ValueError(f'{_RULE}; field {number}, "{field}", is negative')
    return size
