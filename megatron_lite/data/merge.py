"""Several .bin/.idx pairs joined into one, in constant memory; its names appear once it is whole.

Documents keep their order, pair after pair. Called by tools/merge_datasets.py.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError
from megatron_lite.data.files import naming
from megatron_lite.data.indexed_dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)

_BLOCK = 1 << 16  # entries of an index worked on at once


def find_pairs(inputs: Sequence[str]) -> list[str]:
    """Return prefixes: those given, and for a folder those of its pairs, in the order of names.

    DataError for a folder without a pair, half a pair, and a prefix that comes twice.
    """
    found: list[str] = []
    for given in inputs:
        folder = Path(given)
        if not folder.is_dir():
            found.append(given)
            continue
        stems = {p.with_suffix("") for p in folder.iterdir() if p.suffix in (".bin", ".idx")}
        if not stems:
            raise DataError(f"{given}: no .bin/.idx pair is there")
        found += map(str, sorted(stems))
    if twice := [prefix for prefix in found if found.count(prefix) > 1]:
        raise DataError(f"{twice[0]}: given twice")
    return found


def merge(prefixes: Sequence[str], output: str) -> IndexedDataset:
    """Write the pair `output` from the others, one after the other; returns it, opened.

    DataError, and no file at `output`, where a pair can't be read, two store their tokens as
    different types, or `output` is one of the inputs.
    """
    if Path(output).absolute() in (Path(prefix).absolute() for prefix in prefixes):
        raise DataError(f"{output}: lies among the inputs; choose another output prefix")
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    for source in sources[1:]:
        if source.dtype != sources[0].dtype:
            raise DataError(
                f"{source.prefix}: stores {source.dtype.name}, but {sources[0].prefix} "
                f"{sources[0].dtype.name}; preprocess one of them again with the other's tokenizer"
            )
    with _unpublished(output) as (tokens, index):
        for source in sources:
            with bin_path(source.prefix).open("rb") as file:
                shutil.copyfileobj(file, tokens, 1 << 22)
        for block in _index(sources):
            index.write(block)
    return IndexedDataset(output)


def _index(sources: Sequence[IndexedDataset]) -> Iterator[bytes]:
    """Yield the parts of the joined index."""
    dtype = sources[0].dtype
    sequences = [len(source) for source in sources]
    documents = sum(source.num_documents for source in sources)
    code = DTYPES.index(dtype) + 1
    yield HEADER.pack(MAGIC, VERSION, code, sum(sequences), documents + 1)
    for source in sources:
        yield from _blocks(source.sequence_lengths, 0)
    starts = accumulate((s.num_tokens * dtype.itemsize for s in sources), initial=0)
    for source, start in zip(sources, starts, strict=False):
        yield from _blocks(source.sequence_pointers, start)
    for source, before in zip(sources, accumulate(sequences, initial=0), strict=False):
        yield from _blocks(source.document_indices[:-1], before)
    yield np.array([sum(sequences)], dtype="<i8").tobytes()


def _blocks(entries: npt.NDArray[np.integer], shift: int) -> Iterator[bytes]:
    for first in range(0, len(entries), _BLOCK):
        yield (entries[first : first + _BLOCK] + shift).astype(entries.dtype).tobytes()


@contextmanager
def _unpublished(prefix: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open both files under temporary names, which they lose where the block ends well.

    DataError when the place can't be written, or another process writes this prefix.
    """
    partials = [Path(f"{path}.partial") for path in (bin_path(prefix), idx_path(prefix))]
    try:
        partials[0].parent.mkdir(parents=True, exist_ok=True)
        tokens = partials[0].open("ab")  # "ab": the lock comes before the truncation
    except OSError as error:
        raise DataError(f"{partials[0]}: can't be written: {error.strerror}") from error
    with naming(prefix), tokens:
        try:
            fcntl.flock(tokens.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{partials[0]}: another process is writing this prefix") from error
        try:
            tokens.truncate(0)  # what an interrupted run left
            with partials[1].open("wb") as index:
                yield tokens, index
                for file in (tokens, index):
                    file.flush()
                    os.fsync(file.fileno())
            # An index of an older run must never stand beside the new tokens.
            idx_path(prefix).unlink(missing_ok=True)
            partials[0].replace(bin_path(prefix))
            partials[1].replace(idx_path(prefix))
        finally:
            for partial in partials:
                partial.unlink(missing_ok=True)
