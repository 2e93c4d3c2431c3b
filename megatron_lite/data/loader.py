"""Sample numbers → tensors on the host, in this process or in worker processes.

The only file of megatron_lite.data that imports torch. The order is the caller's (sampler.py); the
batches are the same for any number of workers. Called by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lite.data.boundaries import (
    WITHOUT_BOUNDARIES,
    Boundaries,
    documents_between,
    positions_inside,
    weights_of_labels,
)
from megatron_lite.data.errors import DataError
from megatron_lite.data.source import SampleSource


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: tokens and labels int64 [b, s], loss_mask float32 [b, s] of 0 and 1.

    Only where they are asked for: position_ids int64 [b, s] count from 0 in each document,
    document_ids int32 [b, s] are equal inside a document and rise along a row.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the batch on a device; from pinned memory the copies run in the background."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Return the batch in page-locked memory (torch's loader calls this)."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, move: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        return MicroBatch(
            move(self.tokens),
            move(self.labels),
            move(self.loss_mask),
            None if self.position_ids is None else move(self.position_ids),
            None if self.document_ids is None else move(self.document_ids),
        )


class _BatchReader(Dataset[MicroBatch | DataError]):
    """List of sample numbers → MicroBatch, or the error that the data gave."""

    def __init__(self, source: SampleSource, boundaries: Boundaries) -> None:
        self._source = source
        self._boundaries = boundaries

    def __getitem__(self, samples: Sequence[int]) -> MicroBatch | DataError:
        try:
            return self._read(samples)
        except DataError as error:
            # Raised in a worker it would arrive with that process's traceback as its text.
            return error

    def _read(self, samples: Sequence[int]) -> MicroBatch:
        boundaries = self._boundaries
        layers = 3 if boundaries.packed else 1  # see SampleSource
        rows = np.zeros((len(samples), layers, self._source.seq_length + 1), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):
            if sample >= 0:
                row[:] = self._source[sample]
        inputs, labels = rows[:, 0, :-1].copy(), rows[:, 0, 1:].copy()
        loss_mask = np.ones(inputs.shape, dtype=np.float32)
        loss_mask[[sample < 0 for sample in samples]] = 0.0
        if boundaries.packed:
            loss_mask *= weights_of_labels(rows[:, 1], rows[:, 2])
        if boundaries.eod_mask_loss:
            loss_mask[inputs == boundaries.eod] = 0.0
        batch = MicroBatch(*map(torch.from_numpy, (inputs, labels, loss_mask)))
        if not boundaries.resets:
            return batch
        if boundaries.packed:
            document_ids = rows[:, 2, :-1].astype(np.int32)
        else:
            document_ids = documents_between(inputs, boundaries.eod)
        return replace(
            batch,
            position_ids=torch.from_numpy(positions_inside(document_ids))
            if boundaries.reset_position_ids
            else None,
            document_ids=torch.from_numpy(document_ids)
            if boundaries.reset_attention_mask
            else None,
        )


def _as_is(batch: Any) -> Any:
    return batch


def micro_batches(
    dataset: SampleSource,
    batches: Iterable[list[int]],
    *,
    num_workers: int = 0,
    boundaries: Boundaries = WITHOUT_BOUNDARIES,
) -> Iterator[MicroBatch]:
    """Iterate over the micro-batches that `batches` names, in that order.

    Sample -1 is a row of token 0 with loss_mask 0. num_workers 0 reads in this process; otherwise
    worker processes read ahead and live as long as the iterator. torch's global random state is
    untouched.
    """
    loader = DataLoader(
        _BatchReader(dataset, boundaries),
        batch_size=None,  # an item of the sampler is a whole micro-batch
        sampler=batches,
        collate_fn=_as_is,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else each loader draws from the global generator
    )
    return map(_checked, iter(loader))


def _checked(read: MicroBatch | DataError) -> MicroBatch:
    if isinstance(read, DataError):
        raise read
    return read
