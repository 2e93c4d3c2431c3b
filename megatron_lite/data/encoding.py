"""A block of an input → token ids of each requested field: the work of one preprocessing process.

The same block gives the same result anywhere and in any order. Called by preprocess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_lite.data.blocks import Block, Place, Record, read_records
from megatron_lite.data.engine import Engine, EngineError, NativeEngine
from megatron_lite.data.errors import DataError
from megatron_lite.data.jsonl import LineError, replace_surrogates, text_field
from megatron_lite.data.tokenizer_base import TokenBatch, Tokenizer

# Ends of sentences: . ! ? with closing quotes and white space, a full-width stop, a blank line.
_SENTENCE_END = re.compile("[.!?][\"')\\]]*\\s+|[\u3002\uff01\uff1f]\\s*|\\n\\s*\\n")
_STRIDE = 1009  # prime: documents compared in a block lie elsewhere in the next
_NO_INTEGERS = np.empty(0, dtype=np.int32)
_NO_TOKENS = TokenBatch(_NO_INTEGERS, np.empty(0, dtype=np.int64))


@dataclass
class FieldResult:
    """Documents of one field, one after the other, and what was counted on the way."""

    tokens: npt.NDArray[np.integer] = field(default_factory=lambda: _NO_INTEGERS)
    """[tokens] of all documents, in the type of the output."""
    lengths: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_INTEGERS)
    """[sequences] tokens of each sequence."""
    sequences: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_INTEGERS)
    """[documents] sequences of each document."""
    found: int = 0
    """Records that hold a text under the field."""
    empty: int = 0
    """Those of them without a token."""
    missing: int = 0
    """Records where the field is missing or null."""
    surrogates: int = 0
    """Lone surrogates replaced by U+FFFD."""


@dataclass
class BlockResult:
    """What one block gave. Numbers of lines and records count from 1 in the block."""

    place: Place
    lines: int
    """Lines or records that the block spans."""
    records: int = 0
    fields: dict[str, FieldResult] = field(default_factory=dict)
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Number and fault of each line that was skipped."""
    error: tuple[int, str] | None = None
    """The line at which the run must stop, and its fault."""
    disagreement: tuple[int, str] | None = None
    """The line where the engine failed or gave other tokens than the tokenizer, and how; all of
    the block was done again with the tokenizer. A failure is told at the block's first line."""


def split_sentences(text: str) -> list[str]:
    """Cut a text into sentences that together are the text; knows nothing of abbreviations."""
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


class _Stop(Exception):
    """A line can't be used, and such lines may not be skipped."""


class _Disagreement(Exception):
    """The engine's tokens of a document aren't the tokenizer's."""

    def __init__(self, number: int, fault: str) -> None:
        self.number, self.fault = number, fault


@dataclass
class _Columns:
    """The texts of a block: for every record its number, and under each key its text or None."""

    numbers: list[int]
    texts: dict[str, list[str | None]]
    surrogates: dict[str, int]


@dataclass(frozen=True)
class BlockEncoder:
    """Encodes blocks; the switches are those of tools/preprocess_data.py."""

    tokenizer: Tokenizer
    engine: Engine
    keys: Sequence[str]
    dtype: np.dtype
    prepend_bos: bool = False
    append_eod: bool = False
    sentences: bool = False
    skip_bad_lines: bool = False
    skip_missing_keys: bool = False
    check_every: int = 2000

    def __call__(self, block: Block) -> BlockResult:
        """Encode every record of a block, or stop at the first bad one and set `error`."""
        records, lines = read_records(block.format, block.load())
        result = BlockResult(block.place, lines)
        try:
            columns = self._read(records, result)
        except _Stop:
            return result
        result.records = len(columns.numbers)
        try:
            result.fields = self._encode(columns, self.engine, block=block.place.number)
        except _Disagreement as found:
            result.disagreement = (found.number, found.fault)
        except EngineError as error:
            result.disagreement = (columns.numbers[0], str(error))
        if result.disagreement is not None:
            native = NativeEngine(self.tokenizer)
            result.fields = self._encode(columns, native, block=block.place.number)
        return result

    def _read(self, records: Iterator[Record], result: BlockResult) -> _Columns:
        columns = _Columns([], {key: [] for key in self.keys}, dict.fromkeys(self.keys, 0))
        numbers, key = columns.numbers, self.keys[0]
        texts = columns.texts[key]
        short = len(self.keys) == 1 and not self.tokenizer.refuses_texts
        for number, content, exact in records:
            if short and exact and type(content) is dict:  # the usual case, without a call
                text = content.get(key)
                if type(text) is str:
                    numbers.append(number)
                    texts.append(text)
                    continue
            try:
                self._take(number, content, columns, exact=exact)
            except (LineError, DataError) as error:
                if not self.skip_bad_lines:
                    result.error = (number, str(error))
                    raise _Stop from error
                result.bad.append((number, str(error)))
        return columns

    def _take(
        self, number: int, content: dict[str, Any] | LineError, columns: _Columns, *, exact: bool
    ) -> None:
        """Add a record's texts; LineError or DataError when it can't be used."""
        if isinstance(content, LineError):
            raise content
        texts = [text_field(content, key) for key in self.keys]
        if None in texts and not self.skip_missing_keys:
            key = self.keys[texts.index(None)]
            raise LineError(f"field {key!r} is {'null' if key in content else 'missing'}")
        if self.tokenizer.refuses_texts:
            self.tokenizer.tokenize_batch([text for text in texts if text])
        columns.numbers.append(number)
        for key, text in zip(self.keys, texts, strict=True):
            if text is not None and not exact:
                text, replaced = replace_surrogates(text)
                columns.surrogates[key] += replaced
            columns.texts[key].append(text)

    def _encode(self, columns: _Columns, engine: Engine, *, block: int) -> dict[str, FieldResult]:
        """Return the fields; EngineError or _Disagreement where the engine can't be used."""
        fields = {}
        for key in self.keys:
            documents, numbers, part = [], [], FieldResult(surrogates=columns.surrogates[key])
            for number, text in zip(columns.numbers, columns.texts[key], strict=True):
                if text is None:
                    part.missing += 1
                elif text and not text.isspace():
                    documents.append(text)
                    numbers.append(number)
                else:
                    part.empty += 1
            part.found = part.empty + len(documents)
            parts = [split_sentences(text) if self.sentences else [text] for text in documents]
            batch = engine.encode(list(chain.from_iterable(parts))) if parts else _NO_TOKENS
            counts = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
            if engine.checked:
                first = -block * _STRIDE % self.check_every
                chosen = range(first, len(parts), self.check_every)
                self._compare(chosen, parts, counts, batch, numbers)
            self._fill(part, batch, counts)
            fields[key] = part
        return fields

    def _compare(
        self,
        chosen: range,
        parts: list[list[str]],
        counts: npt.NDArray[np.int64],
        batch: TokenBatch,
        numbers: list[int],
    ) -> None:
        """Compare the chosen documents with the tokenizer's own answer."""
        if not chosen:
            return
        ends = np.cumsum(counts)
        stops = np.cumsum(batch.lengths)
        for index in chosen:
            want = self.tokenizer.tokenize_batch(parts[index])
            sequences = slice(ends[index] - counts[index], ends[index])
            stop = stops[ends[index] - 1]
            got = batch.ids[stop - batch.lengths[sequences].sum() : stop]
            same = np.array_equal(want.lengths, batch.lengths[sequences])
            if not (same and np.array_equal(want.ids, got)):
                fault = f"{self.engine.name} gives other tokens than the tokenizer"
                raise _Disagreement(numbers[index], fault)

    def _fill(self, part: FieldResult, batch: TokenBatch, counts: npt.NDArray[np.int64]) -> None:
        """Put in the documents that have tokens, with the requested special tokens."""
        ids, lengths = batch
        if ids.size and not 0 <= int(ids.max()) < self.tokenizer.vocab_size:
            raise RuntimeError(f"the tokenizer gave {ids.max()}, outside its vocabulary")
        if not lengths.all():
            used = np.add.reduceat(lengths > 0, np.cumsum(counts) - counts, dtype=np.int64)
            lengths, counts = lengths[lengths > 0], used[used > 0]
            part.empty += int(np.count_nonzero(used == 0))
        lasts = np.cumsum(counts) - 1
        firsts = lasts - counts + 1
        part.tokens, part.lengths = self._with_special_tokens(ids, lengths, firsts, lasts)
        part.sequences = counts.astype(np.int32)

    def _with_special_tokens(
        self,
        ids: npt.NDArray[np.integer],
        lengths: npt.NDArray[np.int64],
        firsts: npt.NDArray[np.int64],
        lasts: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int32]]:
        """Return tokens and lengths with begin before `firsts` and end after `lasts`."""
        lengths = lengths.astype(np.int64)
        bos = self.tokenizer.bos if self.prepend_bos else None
        eod = self.tokenizer.eod if self.append_eod else None
        if bos is not None:
            lengths[firsts] += 1
        if eod is not None:
            lengths[lasts] += 1
        ends = np.cumsum(lengths)
        if (bos is None and eod is None) or not lengths.size:
            return ids.astype(self.dtype), lengths.astype(np.int32)
        tokens = np.empty(ends[-1], dtype=self.dtype)
        plain = np.ones(ends[-1], dtype=bool)
        for token, places in ((bos, (ends - lengths)[firsts]), (eod, ends[lasts] - 1)):
            if token is not None:
                tokens[places] = token
                plain[places] = False
        tokens[plain] = ids
        return tokens, lengths.astype(np.int32)
