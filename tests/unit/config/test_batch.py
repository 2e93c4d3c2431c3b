"""Batch arithmetic, against a step-by-step count."""

from __future__ import annotations

import doctest
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config import batch, blend, derive
from megatron_lite.config import split as split_module


@dataclass(frozen=True)
class Sizes:
    global_batch_size: int
    rampup_batch_size: tuple[int, int, int] | None = None
    train_iters: int | None = None
    train_samples: int | None = None


@dataclass(frozen=True)
class Parallel:
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int


def test_sizes_and_their_faults() -> None:
    assert batch.data_parallel_size(2048, Parallel(8, 4)) == 64
    assert batch.num_microbatches(1536, 1, 64) == 24
    with pytest.raises(ValueError, match=r"world size 6 is not a multiple of .* 4"):
        batch.data_parallel_size(6, Parallel(2, 2))
    with pytest.raises(ValueError, match="at least 1"):
        batch.data_parallel_size(0, Parallel(1, 1))
    with pytest.raises(ValueError, match=r"global batch size 7 is not a multiple of .* 4"):
        batch.num_microbatches(7, 2, 2)


def test_ramp_up_example() -> None:
    sizes = Sizes(32, (16, 8, 300), train_iters=100)
    at = [batch.global_batch_size_at(sizes, n) for n in (0, 149, 150, 299, 300, 10_000)]
    assert at == [16, 16, 24, 24, 32, 32]
    assert [batch.consumed_samples_at(sizes, i) for i in (0, 10, 16, 17)] == [0, 160, 304, 336]
    assert batch.rampup_batch_sizes(sizes) == [16, 24]


def test_length_in_samples() -> None:
    assert batch.train_iters(Sizes(32, train_samples=1000)) == 31
    assert batch.train_iters(Sizes(32, train_iters=7)) == 7
    assert batch.train_iters(Sizes(32, (16, 8, 300), train_samples=40)) == 2
    assert batch.train_iters(Sizes(32, (16, 8, 300), train_samples=304 + 63)) == 17


@st.composite
def ramps(draw: st.DrawFn) -> Sizes:
    start, increment = draw(st.integers(1, 20)), draw(st.integers(1, 10))
    goal = start + increment * draw(st.integers(1, 8))
    samples = draw(st.integers(1, 500))
    return Sizes(goal, (start, increment, samples), train_samples=draw(st.integers(1, 2000)))


@given(ramps())
def test_closed_forms_equal_counting(sizes: Sizes) -> None:
    assert sizes.train_samples is not None and batch.rampup_fault(sizes) is None
    consumed, iteration, seen = 0, 0, set()
    while True:
        assert batch.consumed_samples_at(sizes, iteration) == consumed
        size = batch.global_batch_size_at(sizes, consumed)
        if consumed + size > sizes.train_samples:
            break
        if consumed < sizes.rampup_batch_size[2]:
            seen.add(size)
        consumed, iteration = consumed + size, iteration + 1
    assert batch.train_iters(sizes) == iteration
    assert seen <= set(batch.rampup_batch_sizes(sizes))


@given(ramps(), st.integers(0, 600))
def test_ramp_up_equals_its_definition(sizes: Sizes, consumed: int) -> None:
    """Equal distances of samples / increments; a step at or past the k-th has k increments."""
    start, increment, samples = sizes.rampup_batch_size
    increments = (sizes.global_batch_size - start) // increment
    passed = sum(consumed * increments >= k * samples for k in range(1, increments + 1))
    assert batch.global_batch_size_at(sizes, consumed) == start + passed * increment


def test_docstring_examples_hold() -> None:
    for module in (batch, split_module, blend, derive):
        result = doctest.testmod(module)
        assert result.attempted > 0 and result.failed == 0
