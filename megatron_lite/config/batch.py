"""The only arithmetic on batches: micro-batches, ramp-up, iterations, consumed samples.

Whole numbers throughout. Sizes of a batch are in samples; an iteration is one optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class ParallelSizes(Protocol):
    """What `data_parallel_size` reads of the section `parallel`."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def pipeline_model_parallel_size(self) -> int: ...


class BatchSizes(Protocol):
    """What the functions below read of the section `training`."""

    @property
    def global_batch_size(self) -> int: ...
    @property
    def rampup_batch_size(self) -> tuple[int, int, int] | None: ...
    @property
    def train_iters(self) -> int | None: ...
    @property
    def train_samples(self) -> int | None: ...


def data_parallel_size(world_size: int, parallel: ParallelSizes) -> int:
    """Copies of the model: world size / (tensor x pipeline).

    16 ranks at tensor 2 x pipeline 4 hold 2 copies.

    Raises:
        ValueError: the world size is below 1 or no multiple of tensor x pipeline.
    """
    if world_size < 1:
        raise ValueError(f"world size {world_size} must be at least 1")
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return _quotient(world_size, model_ranks, "world size", "tensor x pipeline size")


def num_microbatches(global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Micro-batches that each data-parallel rank runs in one step.

    >>> num_microbatches(32, 4, 2)
    4

    Raises:
        ValueError: the global batch is not a multiple of micro_batch_size x dp.
    """
    one = micro_batch_size * dp
    return _quotient(
        global_batch_size, one, "global batch size", "micro batch x data-parallel size"
    )


def rampup_fault(training: BatchSizes) -> str | None:
    """Why the ramp-up cannot reach the global batch size; None where it can or there is none."""
    if training.rampup_batch_size is None:
        return None
    start, increment, _ = training.rampup_batch_size
    goal = training.global_batch_size
    if start >= goal:
        return f"start {start} must be below training.global_batch_size {goal}"
    if (goal - start) % increment:
        return f"increment {increment} must divide {goal} - {start} = {goal - start}"
    return None


def global_batch_size_at(training: BatchSizes, consumed_samples: int) -> int:
    """Samples of the step that begins after `consumed_samples`.

    `[16, 8, 300]` towards 32 takes two increments, one each 150 samples: 16 below 150, 24 below
    300, then 32. Source: the ramp-up of Megatron-LM
    (`megatron/core/num_microbatches_calculator.py`).
    """
    goal = training.global_batch_size
    if training.rampup_batch_size is None:
        return goal
    start, increment, samples = training.rampup_batch_size
    if consumed_samples >= samples:
        return goal
    increments = (goal - start) // increment
    return start + increment * (consumed_samples * increments // samples)


def train_iters(training: BatchSizes) -> int:
    """Iterations of the whole run: `train_iters`, or the full batches that `train_samples` holds.

    1,000 samples in batches of 32 are 31 iterations; the last 8 samples are left out.
    """
    if training.train_iters is not None:
        return training.train_iters
    assert training.train_samples is not None, "validation demands train_iters or train_samples"
    left, iterations = training.train_samples, 0
    for batch, count in _ramp(training):
        fitting = min(count, left // batch)
        left -= fitting * batch
        iterations += fitting
        if fitting < count:
            return iterations
    return iterations + left // training.global_batch_size


def consumed_samples_at(training: BatchSizes, iteration: int) -> int:
    """Samples consumed by the first `iteration` iterations.

    With the ramp-up above, 10 iterations of 16 reach 160, 6 of 24 reach 304; iteration 17 is the
    first of 32.
    """
    consumed = 0
    for batch, count in _ramp(training):
        steps = min(count, iteration)
        consumed += steps * batch
        iteration -= steps
    return consumed + iteration * training.global_batch_size


def rampup_batch_sizes(training: BatchSizes) -> list[int]:
    """Every size that a step of the ramp-up has, smallest first; empty without ramp-up."""
    return [batch for batch, _ in _ramp(training)]


def _ramp(training: BatchSizes) -> Iterator[tuple[int, int]]:
    """(batch size, iterations) of each level of the ramp-up; after it the size is the full one."""
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    increments = (training.global_batch_size - start) // increment
    consumed = 0
    while consumed < samples:
        batch = global_batch_size_at(training, consumed)
        level = (batch - start) // increment
        next_level = -(-(level + 1) * samples // increments)  # first sample count past this level
        count = -(-(next_level - consumed) // batch)
        yield batch, count
        consumed += count * batch


def _quotient(total: int, part: int, total_name: str, part_name: str) -> int:
    if total % part:
        raise ValueError(f"{total_name} {total} is not a multiple of {part_name} {part}")
    return total // part
