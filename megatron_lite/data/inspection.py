"""A description of a .bin/.idx pair for a person, a check of its content, and where two differ.

Called by tools/inspect_data.py. The reader itself already refuses files that don't fit together.
Files are read in blocks, whatever their size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_dataset import VERSION, IndexedDataset
from megatron_lite.data.tokenizer_base import Tokenizer

_BLOCK = 1 << 24  # tokens read at once
_DOCUMENTS = 1 << 16  # documents looked at at once
_SHOWN = 64  # tokens of a document


@dataclass
class Content:
    """What a scan of all tokens found."""

    lowest: int | None = None
    highest: int | None = None
    empty: list[int] = field(default_factory=list)
    """The first documents without a token; `empties` counts all of them."""
    empties: int = 0
    last_tokens: Counter[int] = field(default_factory=Counter)
    """How many documents end in a token."""
    occurrences: int = 0
    """How often the commonest of these comes, wherever it stands."""

    @property
    def end(self) -> int | None:
        """The token that most documents end in."""
        return self.last_tokens.most_common(1)[0][0] if self.last_tokens else None


def scan(dataset: IndexedDataset, *, end: int | None = None) -> Content:
    """Read all tokens; `end` is the end-of-document token, null: the commonest last token."""
    found = Content()
    for first in range(0, dataset.num_documents, _DOCUMENTS):
        last = min(first + _DOCUMENTS, dataset.num_documents)
        lengths = dataset.document_lengths(first, last)
        empty = np.flatnonzero(lengths == 0)
        found.empties += len(empty)
        found.empty += (first + empty[: 1 - len(found.empty)]).tolist()
        ends = dataset.document_start(first) + np.cumsum(lengths, dtype=np.int64)
        tokens = dataset.take(ends[lengths > 0] - 1)
        values, counts = np.unique(tokens, return_counts=True)
        found.last_tokens.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    end = found.end if end is None else end
    for start in range(0, dataset.num_tokens, _BLOCK):
        block = dataset.read(start, start + _BLOCK)
        low, high = int(block.min()), int(block.max())
        found.lowest = low if found.lowest is None else min(low, found.lowest)
        found.highest = high if found.highest is None else max(high, found.highest)
        found.occurrences += 0 if end is None else int(np.count_nonzero(block == end))
    return found


def describe(prefix: str, *, show: int = 0, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """Yield lines: header, counts, lengths, tokens, and the start of `show` documents."""
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
    eod = None if tokenizer is None else tokenizer.eod
    content = scan(dataset, end=eod)
    if content.lowest is None:
        yield "token range  no tokens"
    else:
        yield f"token range  {content.lowest} to {content.highest}"
        yield _ends(content, eod, dataset.num_documents)
    for document in range(min(show, dataset.num_documents)):
        yield from _document(dataset, document, tokenizer)


def _ends(content: Content, eod: int | None, documents: int) -> str:
    """How documents end: all in one token, if one was appended, which comes nowhere else then."""
    token = content.end if eod is None else eod
    assert token is not None
    name = "commonest last token" if eod is None else "end of document"
    ended = content.last_tokens[token]
    return (
        f"last tokens  {token} ({name}) ends {ended} of {documents} documents and comes "
        f"{content.occurrences - ended} times elsewhere"
    )


def _document(dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    tokens = dataset.read(*map(dataset.document_start, (document, document + 1)))
    listed = [int(token) for token in tokens[:_SHOWN]]
    rest = f" … {len(tokens) - len(listed)} more" if len(tokens) > len(listed) else ""
    yield f"document {document}: {len(tokens)} tokens{rest and f', the first {_SHOWN}'}"
    if tokenizer is None:
        yield f"  {' '.join(map(str, listed))}{rest}"
    else:
        _check_ids(dataset.prefix, max(listed, default=0), tokenizer.vocab_size)
        yield f"  {tokenizer.detokenize(listed)!r}{rest}"


def check(prefix: str, *, vocab_size: int | None = None, eod: int | None = None) -> None:
    """Raise DataError when the files don't fit together or hold what no tokenizer writes.

    Refused are empty documents, negative ids, with a vocabulary ids outside it, and documents that
    do not end in `eod` where most do.
    """
    dataset = IndexedDataset(prefix)
    content = scan(dataset, end=eod)
    if content.empties:
        raise DataError(
            f"{prefix}: {content.empties} empty documents, the first is {content.empty[0]}"
        )
    if content.lowest is not None and content.lowest < 0:
        raise DataError(f"{prefix}: negative token id {content.lowest}")
    if vocab_size is not None:
        _check_ids(prefix, content.highest or 0, vocab_size)
    ended = 0 if eod is None else content.last_tokens[eod]
    if dataset.num_documents / 2 < ended < dataset.num_documents:
        raise DataError(
            f"{prefix}: {dataset.num_documents - ended} of {dataset.num_documents} documents do "
            f"not end in the end-of-document token {eod}, as the others do"
        )


def _check_ids(prefix: str, highest: int, vocab_size: int) -> None:
    if highest >= vocab_size:
        raise DataError(
            f"{prefix}: token id {highest}, but the vocabulary has {vocab_size} ids; was the data "
            f"made with another tokenizer?"
        )


def differences(one: str, other: str) -> Iterator[str]:
    """Yield lines on where two pairs differ: type, counts, the first length and token; else none.

    The same tokens stored as another type are told as that alone.
    """
    a, b = IndexedDataset(one), IndexedDataset(other)
    if a.dtype != b.dtype:
        yield f"stored as {a.dtype.name}, {b.dtype.name}"
    for name in ("num_documents", "num_tokens"):
        counts = getattr(a, name), getattr(b, name)
        if counts[0] != counts[1]:
            yield f"{name.removeprefix('num_')}: {counts[0]}, {counts[1]}"
    documents = min(a.num_documents, b.num_documents)
    for first in range(0, documents, _DOCUMENTS):
        last = min(first + _DOCUMENTS, documents)
        lengths = a.document_lengths(first, last), b.document_lengths(first, last)
        unlike = np.flatnonzero(lengths[0] != lengths[1])
        if unlike.size:
            at = int(unlike[0])
            yield f"document {first + at}: {lengths[0][at]} tokens, {lengths[1][at]}"
            break
    for start in range(0, min(a.num_tokens, b.num_tokens), _BLOCK):
        stop = min(start + _BLOCK, a.num_tokens, b.num_tokens)
        unlike = np.flatnonzero(a.read(start, stop) != b.read(start, stop))
        if unlike.size:
            at = start + int(unlike[0])
            document = a.document_at(at)
            where = f"token {at - a.document_start(document)} of document {document}"
            yield f"{where}: {a.read(at, at + 1)[0]}, {b.read(at, at + 1)[0]}"
            break
