"""Which sample numbers a data-parallel rank reads, in which order: pure integers, no state.

The number of the next sample is the whole position of a run. Called by training_order and the
composition root; the loader reads what is named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

Ranges = Sequence[tuple[int, int]]
"""Sample numbers [first, last) that are left out."""


def _check(micro_batch_size: int, dp_rank: int, dp: int) -> None:
    if micro_batch_size < 1 or dp < 1 or not 0 <= dp_rank < dp:
        raise ValueError(f"micro_batch_size {micro_batch_size}, rank {dp_rank} of {dp}")


def joined(ranges: Ranges) -> list[tuple[int, int]]:
    """Return the same numbers as ranges that rise and don't touch.

    >>> joined([(7, 9), (2, 4), (3, 5), (9, 9)])
    [(2, 5), (7, 9)]
    """
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        elif first < last:
            found.append((first, last))
    return found


def kept(start: int, index: int, skip: Ranges = ()) -> int:
    """Return the number that comes `index` places after the first one from `start` on.

    `skip` is as `joined` returns it; numbers in it have no place.

    >>> [kept(3, index, [(2, 5), (7, 9)]) for index in range(4)]
    [5, 6, 9, 10]
    """
    number = start + index
    for first, last in skip:
        if last > start:
            if number < first:
                break
            number += last - max(first, start)
    return number


def training_batches(
    start: int, *, micro_batch_size: int, dp_rank: int, dp: int, skip: Ranges = ()
) -> Iterator[list[int]]:
    """Yield the micro-batches of one rank without end, from number `start` on.

    Without `skip`, micro-batch i of rank r is the micro_batch_size numbers from start +
    (i · dp + r) · micro_batch_size; with it, the numbers in that place among those that are kept. A
    global batch is therefore the same set for every dp and micro-batch size.

    >>> batches = training_batches(8, micro_batch_size=2, dp_rank=1, dp=2)
    >>> [next(batches), next(batches)]
    [[10, 11], [14, 15]]
    """
    _check(micro_batch_size, dp_rank, dp)
    if start < 0:
        raise ValueError(f"sample number {start}")
    places = count(dp_rank * micro_batch_size, dp * micro_batch_size)
    return ([kept(start, place + row, skip) for row in range(micro_batch_size)] for place in places)


def evaluation_batches(
    num_samples: int, *, micro_batch_size: int, dp_rank: int, dp: int
) -> list[list[int]]:
    """Return the micro-batches of one rank over samples 0 … num_samples - 1, each sample once.

    Every rank gets the same number of full micro-batches, so none waits for another; -1 stands
    where the samples have run out, and the loader gives those rows no weight.

    >>> [evaluation_batches(3, micro_batch_size=2, dp_rank=rank, dp=2) for rank in (0, 1)]
    [[[0, 1]], [[2, -1]]]
    """
    _check(micro_batch_size, dp_rank, dp)
    if num_samples < 0:
        raise ValueError(f"num_samples {num_samples}")
    stride = micro_batch_size * dp
    batches = []
    for base in range(dp_rank * micro_batch_size, -(-num_samples // stride) * stride, stride):
        numbers = range(base, base + micro_batch_size)
        batches.append([number if number < num_samples else -1 for number in numbers])
    return batches
