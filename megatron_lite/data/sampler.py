"""Which sample numbers a data-parallel rank reads, in which order: pure integers, no state.

`consumed_samples` is the whole position of a run. Called by the trainer; the loader reads what is
named here.
"""

from __future__ import annotations

from collections.abc import Iterator


def _check(micro_batch_size: int, dp_rank: int, dp: int) -> None:
    if micro_batch_size < 1 or dp < 1 or not 0 <= dp_rank < dp:
        raise ValueError(f"micro_batch_size {micro_batch_size}, rank {dp_rank} of {dp}")


def training_batches(
    consumed_samples: int, *, micro_batch_size: int, dp_rank: int, dp: int
) -> Iterator[list[int]]:
    """Yield the micro-batches of one rank without end, from `consumed_samples` on.

    Micro-batch i of rank r is the micro_batch_size numbers from consumed + (i · dp + r) ·
    micro_batch_size. A global batch is therefore the same set for every dp and micro-batch size.

    >>> batches = training_batches(8, micro_batch_size=2, dp_rank=1, dp=2)
    >>> [next(batches), next(batches)]
    [[10, 11], [14, 15]]
    """
    _check(micro_batch_size, dp_rank, dp)
    if consumed_samples < 0:
        raise ValueError(f"consumed_samples {consumed_samples}")
    return _endless(consumed_samples + dp_rank * micro_batch_size, micro_batch_size, dp)


def _endless(start: int, micro_batch_size: int, dp: int) -> Iterator[list[int]]:
    while True:
        yield list(range(start, start + micro_batch_size))
        start += micro_batch_size * dp


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
