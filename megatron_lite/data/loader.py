"""Sample numbers → tensors on the host, in this process or in worker processes.

The only file of megatron_lite.data that imports torch. The order is the caller's (sampler.py); the
batches are the same for any number of workers. Called by the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lite.data.errors import DataError


class SampleSource(Protocol):
    """What the loader reads: a GPTDataset or a BlendedDataset."""

    seq_length: int

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: tokens and labels int64 [b, s], loss_mask float32 [b, s] of 0 and 1."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return the batch on a device; from pinned memory the copies run in the background."""
        return MicroBatch(
            *(t.to(device, non_blocking=True) for t in (self.tokens, self.labels, self.loss_mask))
        )

    def pin_memory(self) -> MicroBatch:
        """Return the batch in page-locked memory (torch's loader calls this)."""
        return MicroBatch(*(t.pin_memory() for t in (self.tokens, self.labels, self.loss_mask)))


class _BatchReader(Dataset[MicroBatch | DataError]):
    """List of sample numbers → MicroBatch, or the error that the data gave."""

    def __init__(self, source: SampleSource, masked_token: int | None) -> None:
        self._source = source
        self._masked_token = masked_token

    def __getitem__(self, samples: Sequence[int]) -> MicroBatch | DataError:
        try:
            return self._read(samples)
        except DataError as error:
            # Raised in a worker it would arrive with that process's traceback as its text.
            return error

    def _read(self, samples: Sequence[int]) -> MicroBatch:
        rows = np.zeros((len(samples), self._source.seq_length + 1), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):
            if sample >= 0:
                row[:] = self._source[sample]
        tokens = torch.from_numpy(rows)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss_mask = torch.ones_like(inputs, dtype=torch.float32)
        loss_mask[torch.tensor([sample < 0 for sample in samples], dtype=torch.bool)] = 0.0
        if self._masked_token is not None:
            loss_mask[inputs == self._masked_token] = 0.0
        return MicroBatch(inputs, labels, loss_mask)


def _as_is(batch: Any) -> Any:
    return batch


def micro_batches(
    dataset: SampleSource,
    batches: Iterable[list[int]],
    *,
    num_workers: int = 0,
    eod_mask_loss: bool = False,
    eod: int | None = None,
) -> Iterator[MicroBatch]:
    """Iterate over the micro-batches that `batches` names, in that order.

    Sample -1 is a row of token 0 with loss_mask 0. eod_mask_loss gives no weight to positions whose
    input token is `eod` (their label is the first token of an unrelated document, Megatron's
    meaning); DataError without an eod. num_workers 0 reads in this process; otherwise worker
    processes read ahead and live as long as the iterator. torch's global random state is untouched.
    """
    if eod_mask_loss and eod is None:
        raise DataError(
            "data.eod_mask_loss: the tokenizer has no end-of-document token; set it to false or "
            "use a tokenizer that has one"
        )
    loader = DataLoader(
        _BatchReader(dataset, eod if eod_mask_loss else None),
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
