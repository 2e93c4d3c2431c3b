"""A description of a .bin/.idx pair for a person, and a check of its content.

Called by tools/inspect_data.py. The reader itself already refuses files that don't fit together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_dataset import VERSION, IndexedDataset
from megatron_lite.data.tokenizer_base import Tokenizer

_BLOCK = 1 << 24  # tokens scanned at once


def token_range(dataset: IndexedDataset) -> tuple[int, int] | None:
    """Return the lowest and the highest token, None without tokens; reads the whole file."""
    blocks = [dataset.read(start, start + _BLOCK) for start in range(0, dataset.num_tokens, _BLOCK)]
    if not blocks:
        return None
    return min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)


def describe(
    prefix: str, *, show: int = 0, tokenizer: Tokenizer | None = None, shown_tokens: int = 64
) -> Iterator[str]:
    """Yield lines: header, counts, lengths, token range, and the start of `show` documents."""
    dataset = IndexedDataset(prefix)
    lengths = dataset.document_lengths(0, dataset.num_documents)
    yield f"prefix       {prefix}"
    yield f"format       MMIDIDX version {VERSION}, {dataset.dtype.name}"
    yield f"sequences    {len(dataset)}"
    yield f"documents    {dataset.num_documents}"
    yield f"tokens       {dataset.num_tokens} ({dataset.num_tokens * dataset.dtype.itemsize} bytes)"
    if len(lengths):
        yield (
            f"lengths      min {lengths.min()}, median {int(np.median(lengths))}, "
            f"mean {lengths.mean():.1f}, max {lengths.max()} tokens a document"
        )
    limits = token_range(dataset)
    yield f"token range  {f'{limits[0]} to {limits[1]}' if limits else 'no tokens'}"
    for document in range(min(show, dataset.num_documents)):
        tokens = dataset.read(*map(dataset.document_start, (document, document + 1)))
        listed = [int(token) for token in tokens[:shown_tokens]]
        rest = f" … {len(tokens) - len(listed)} more" if len(tokens) > len(listed) else ""
        yield f"document {document}: {len(tokens)} tokens{rest and f', the first {shown_tokens}'}"
        if tokenizer is None:
            yield f"  {' '.join(map(str, listed))}{rest}"
        else:
            _check_ids(prefix, max(listed, default=0), tokenizer)
            yield f"  {tokenizer.detokenize(listed)!r}{rest}"


def check(prefix: str, *, tokenizer: Tokenizer | None = None) -> None:
    """Raise DataError when the files don't fit together or hold what no tokenizer writes.

    Refused are empty documents, negative ids and, with a tokenizer, ids outside its vocabulary.
    """
    dataset = IndexedDataset(prefix)
    lengths = dataset.document_lengths(0, dataset.num_documents)
    empty = np.flatnonzero(lengths == 0)
    if empty.size:
        raise DataError(f"{prefix}: {empty.size} empty documents, the first is {empty[0]}")
    lowest, highest = token_range(dataset) or (0, 0)
    if lowest < 0:
        raise DataError(f"{prefix}: negative token id {lowest}")
    if tokenizer is not None:
        _check_ids(prefix, highest, tokenizer)


def _check_ids(prefix: str, highest: int, tokenizer: Tokenizer) -> None:
    if highest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix}: token id {highest}, but {type(tokenizer).__name__} has "
            f"{tokenizer.vocab_size} ids; was the data made with another tokenizer?"
        )
