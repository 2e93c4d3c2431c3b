"""Which documents an iteration of a run was made of, for a person who looks for a bad one.

Counts from a position that the caller knows, as the trainer would; reads no token. Called by
tools/inspect_data.py, and by a run whose numbers go wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from megatron_lite.config.batch import BatchSizes, global_batch_size_at, num_microbatches
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.build import build_datasets
from megatron_lite.data.document_order import Piece
from megatron_lite.data.errors import DataError
from megatron_lite.data.training_order import TrainingOrder
from megatron_lite.progress import Progress


@dataclass(frozen=True)
class Origin:
    """Where a training sample comes from."""

    sample: int
    """Its number in the run."""
    source: str
    """Prefix of the corpus."""
    number: int
    """Its number in the source."""
    pieces: list[Piece]

    def lines(self) -> Iterator[str]:
        """In words, a line a document."""
        yield f"sample {self.sample}: number {self.number} of {self.source}"
        for document, offset, length in self.pieces:
            yield f"  document {document}, tokens {offset} to {offset + length - 1}"


def origins(
    order: TrainingOrder,
    start: int,
    *,
    micro_batch: int,
    micro_batch_size: int,
    dp_rank: int,
    dp: int,
) -> list[Origin]:
    """Return the origins of a replica's micro-batch of the step that begins at sample `start`."""
    batches = order.batches(start, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp=dp)
    return [_origin(order, sample) for sample in next(islice(batches, micro_batch, None))]


def which_documents(
    config: RunConfig, progress: Progress, *, iteration: int, dp: int
) -> Iterator[str]:
    """Yield lines on each micro-batch of an iteration, on each of `dp` replicas.

    `progress` is where the run stood at any time before the iteration; it is moved there. DataError
    for an iteration that was over then, and where the data can't be opened.
    """
    if iteration <= progress.iteration:
        raise DataError(f"iteration {iteration} does not come after {progress.iteration}")
    training = config.training
    dataset = build_datasets(
        config.data, seq_length=config.model.seq_length, seed=training.seed
    ).train
    order = TrainingOrder.of(dataset, progress, config.data.skip_samples)
    while progress.iteration + 1 < iteration:
        batch, start, end = _next_batch(training, order, progress)
        progress.advance(samples=batch, left_out=end - start - batch, applied=True)
    batch, start, end = _next_batch(training, order, progress)
    yield f"iteration {iteration}: samples {start} to {end - 1} of the run"
    yield f'without them: "skip_samples": [[{start}, {end}]] in the section data'
    size = training.micro_batch_size
    for rank in range(dp):
        batches = order.batches(start, micro_batch_size=size, dp_rank=rank, dp=dp)
        count = num_microbatches(batch, size, dp)
        for number, samples in enumerate(islice(batches, count)):
            yield f"replica {rank}, micro-batch {number}"
            for sample in samples:
                yield from (f"  {line}" for line in _origin(order, sample).lines())


def _next_batch(
    training: BatchSizes, order: TrainingOrder, progress: Progress
) -> tuple[int, int, int]:
    """Samples of the next global batch, its first number and the one behind its last."""
    batch = global_batch_size_at(training, progress.consumed_samples)
    return batch, progress.next_sample, order.after(progress.next_sample, batch)


def _origin(order: TrainingOrder, sample: int) -> Origin:
    source, number = order.dataset.locate(sample)
    pieces = order.dataset.datasets[source].pieces(number)
    return Origin(order.data_start + sample, order.dataset.names[source], number, pieces)
