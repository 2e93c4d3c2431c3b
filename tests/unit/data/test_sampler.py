"""Sample numbers of each data-parallel rank."""

from __future__ import annotations

from itertools import islice

import pytest

from megatron_lite.data.sampler import evaluation_batches, training_batches


def _global_batches(consumed: int, size: int, *, micro: int, dp: int, count: int) -> list[set[int]]:
    """Return the sets of samples of consecutive global batches, joined over the ranks."""
    steps = size // (micro * dp)
    batches: list[set[int]] = [set() for _ in range(count)]
    for rank in range(dp):
        stream = training_batches(consumed, micro_batch_size=micro, dp_rank=rank, dp=dp)
        for batch in batches:
            for numbers in islice(stream, steps):
                assert len(numbers) == micro
                assert not batch & set(numbers)
                batch |= set(numbers)
    return batches


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 4), (2, 3), (3, 4), (12, 1)])
def test_a_global_batch_is_the_same_for_every_layout(micro: int, dp: int) -> None:
    expected = [set(range(24 + 12 * n, 36 + 12 * n)) for n in range(3)]
    assert _global_batches(24, 12, micro=micro, dp=dp, count=3) == expected


def test_resuming_goes_on_where_it_stopped() -> None:
    whole = training_batches(0, micro_batch_size=2, dp_rank=1, dp=2)
    resumed = training_batches(12, micro_batch_size=2, dp_rank=1, dp=2)
    assert list(islice(whole, 6))[3:] == list(islice(resumed, 3))


@pytest.mark.parametrize(("dp", "samples"), [(2, 5), (4, 3), (1, 1), (3, 9), (4, 0)])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_b28_every_sample_once_and_equal_counts(dp: int, samples: int, micro: int) -> None:
    ranks = [
        evaluation_batches(samples, micro_batch_size=micro, dp_rank=rank, dp=dp)
        for rank in range(dp)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    numbers = [n for batches in ranks for batch in batches for n in batch]
    assert sorted(n for n in numbers if n >= 0) == list(range(samples))
    assert all(len(batch) == micro for batches in ranks for batch in batches)
    assert len(numbers) - samples < micro * dp


def test_b28_the_example_of_three_samples_on_four_ranks() -> None:
    ranks = [evaluation_batches(3, micro_batch_size=1, dp_rank=r, dp=4) for r in range(4)]
    assert ranks == [[[0]], [[1]], [[2]], [[-1]]]


def test_impossible_ranks_are_refused_at_once() -> None:
    with pytest.raises(ValueError):
        training_batches(0, micro_batch_size=1, dp_rank=2, dp=2)
    with pytest.raises(ValueError):
        training_batches(-1, micro_batch_size=1, dp_rank=0, dp=2)
    with pytest.raises(ValueError):
        evaluation_batches(3, micro_batch_size=0, dp_rank=0, dp=1)
