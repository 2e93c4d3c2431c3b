"""Sample numbers → tensors on the host, in this process or in worker processes.

The only file of megatron_lite.data that imports torch. The order is the caller's (sampler.py); the
batches are the same for any number of workers. Called by the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
from megatron_lite.data.read_ahead import ReadAhead
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
        tensors = self.tensors().items()
        return MicroBatch(**{name: t.to(device, non_blocking=True) for name, t in tensors})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return those that are there, by name."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in values if tensor is not None}


class _Flat(NamedTuple):
    """A micro-batch as one tensor of bytes: handing a tensor from process to process costs a file
    descriptor and a connection each, whatever its size."""

    data: torch.Tensor
    layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    """Name, dtype and shape of each tensor; wide dtypes first, so that all are aligned."""

    @classmethod
    def of(cls, batch: MicroBatch) -> _Flat:
        found = sorted(batch.tensors().items(), key=lambda pair: -pair[1].element_size())
        data = torch.cat([tensor.view(torch.uint8).flatten() for _, tensor in found])
        return cls(data, tuple((name, t.dtype, tuple(t.shape)) for name, t in found))

    def batch(self) -> MicroBatch:
        """Return the micro-batch, as views of the data."""
        tensors, start = {}, 0
        for name, dtype, shape in self.layout:
            stop = start + prod(shape) * dtype.itemsize
            tensors[name] = self.data[start:stop].view(dtype).view(shape)
            start = stop
        return MicroBatch(**tensors)


class _BatchReader(Dataset[_Flat | DataError]):
    """List of sample numbers → micro-batch, or the error that the data gave."""

    def __init__(self, source: SampleSource, boundaries: Boundaries) -> None:
        self._source = source
        self._boundaries = boundaries

    def __getitem__(self, samples: Sequence[int]) -> _Flat | DataError:
        try:
            return _Flat.of(self._read(samples))
        except DataError as error:
            # Raised in a worker it would arrive with that process's traceback as its text.
            return error

    def _read(self, samples: Sequence[int]) -> MicroBatch:
        boundaries, rows = self._boundaries, self._rows(samples)
        inputs, labels = rows[:, 0, :-1].copy(), rows[:, 0, 1:].copy()
        loss_mask = np.ones(inputs.shape, dtype=np.float32)
        loss_mask[[sample < 0 for sample in samples]] = 0.0
        if boundaries.packed:
            loss_mask *= weights_of_labels(rows[:, 1], rows[:, 2])
        if boundaries.eod_mask_loss:
            loss_mask[inputs == boundaries.eod] = 0.0
        positions = documents = None
        if boundaries.packed:
            documents = rows[:, 2, :-1].astype(np.int32)
        elif boundaries.eod is not None and boundaries.resets:
            documents = documents_between(inputs, boundaries.eod)
        if documents is not None and boundaries.reset_position_ids:
            positions = positions_inside(documents)
        return MicroBatch(
            torch.from_numpy(inputs),
            torch.from_numpy(labels),
            torch.from_numpy(loss_mask),
            position_ids=_tensor(positions),
            document_ids=_tensor(documents if boundaries.reset_attention_mask else None),
        )

    def _rows(self, samples: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the samples, [b, 1, s + 1], or [b, 3, s + 1] of packed conversations."""
        layers = 3 if self._boundaries.packed else 1
        rows = np.zeros((len(samples), layers, self._source.seq_length + 1), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):
            if sample >= 0:
                row[:] = self._source[sample]
        return rows


def _tensor(array: npt.NDArray[Any] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)


_AHEAD_OF_THE_THREAD = 2
"""Micro-batches of each worker that wait in shared memory."""


def _as_is(batch: Any) -> Any:
    return batch


def micro_batches(
    dataset: SampleSource,
    batches: Iterable[list[int]],
    *,
    num_workers: int = 0,
    ahead: int = 8,
    boundaries: Boundaries = WITHOUT_BOUNDARIES,
) -> Iterator[MicroBatch]:
    """Iterate over the micro-batches that `batches` names, in that order.

    Sample -1 is a row of token 0 with loss_mask 0. num_workers 0 reads in this process, when asked;
    otherwise worker processes read, and a thread keeps `ahead` micro-batches ready in this process,
    so that taking one is no work. They live as long as the iterator. torch's global random state
    is untouched.
    """
    loader = DataLoader(
        _BatchReader(dataset, boundaries),
        batch_size=None,  # an item of the sampler is a whole micro-batch
        sampler=batches,
        collate_fn=_as_is,
        num_workers=num_workers,
        prefetch_factor=_AHEAD_OF_THE_THREAD if num_workers else None,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else each loader draws from the global generator
    )
    read = iter(loader)
    return ReadAhead(map(_own, read), depth=ahead) if num_workers else map(_opened, read)


def _opened(read: _Flat | DataError) -> MicroBatch:
    if isinstance(read, DataError):
        raise read
    return read.batch()


def _own(read: _Flat | DataError) -> MicroBatch:
    """The micro-batch in memory of this process: many waiting in shared memory would fill it up."""
    if isinstance(read, _Flat) and read.data.is_shared():
        read = read._replace(data=read.data.clone())
    return _opened(read)
