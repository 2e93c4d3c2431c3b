"""JSON lines → .bin/.idx pairs, one a field, with the same bytes for any number of workers.

Called by tools/preprocess_data.py. Either every pair appears under its final name or none does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_lite.data.encoding import ChunkEncoder, ChunkResult, FieldResult
from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder, token_dtype
from megatron_lite.data.jsonl import Chunk, read_chunks
from megatron_lite.data.progress import Progress
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.data.tokenizer_base import Tokenizer
from megatron_lite.data.worker_pool import WorkerPool


@dataclass(frozen=True)
class PreprocessOptions:
    """The flags of tools/preprocess_data.py."""

    input: Sequence[str]
    output_prefix: str
    tokenizer_type: str
    json_keys: Sequence[str] = ("text",)
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    append_eod: bool = False
    prepend_bos: bool = False
    split_sentences: bool = False
    workers: int = 1
    log_interval: int = 10_000
    skip_bad_lines: bool = False
    skip_missing_keys: bool = False

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer; DataError when it lacks a requested special token."""
        tokenizer = build_tokenizer(
            self.tokenizer_type,
            model=self.tokenizer_model,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            vocab_size=self.vocab_size,
        )
        tokenizer.require(bos=self.prepend_bos, eod=self.append_eod)
        return tokenizer

    def encoder(self) -> ChunkEncoder:
        """Build what one process needs to encode chunks."""
        return ChunkEncoder(
            self.tokenizer(),
            self.json_keys,
            prepend_bos=self.prepend_bos,
            append_eod=self.append_eod,
            sentences=self.split_sentences,
            skip_bad_lines=self.skip_bad_lines,
            skip_missing_keys=self.skip_missing_keys,
        )

    def prefix(self, key: str) -> str:
        """Return the output prefix of a field."""
        level = "sentence" if self.split_sentences else "document"
        return f"{self.output_prefix}_{key}_{level}"


@dataclass
class PreprocessReport:
    """What a run read and wrote; `lines()` is the text for a person."""

    dtype: np.dtype
    records: int = 0
    bad_lines: int = 0
    seconds: float = 0.0
    input_bytes: int = 0
    fields: dict[str, FieldResult] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, result: ChunkResult) -> None:
        """Add the counts of one chunk."""
        self.records += result.records
        self.bad_lines += result.bad_lines
        for key, part in result.fields.items():
            total = self.fields.setdefault(key, FieldResult())
            total.found += part.found
            total.empty += part.empty
            total.missing += part.missing
            total.surrogates += part.surrogates
            self.documents[key] = self.documents.get(key, 0) + len(part.documents)
            self.tokens[key] = self.tokens.get(key, 0) + len(part.tokens)

    def lines(self, options: PreprocessOptions) -> Iterator[str]:
        """Yield the report, one fact group a line."""
        rate = self.input_bytes / 1e6 / max(self.seconds, 1e-9)
        yield (
            f"read {self.records} records, {self.input_bytes / 1e6:.1f} MB in "
            f"{self.seconds:.1f} s ({rate:.2f} MB/s); bad lines skipped: {self.bad_lines}"
        )
        for key, part in self.fields.items():
            yield (
                f"{key}: {self.documents[key]} documents, {self.tokens[key]} tokens "
                f"({self.dtype.name}) in {options.prefix(key)}.bin and .idx"
            )
            yield (
                f"{key}: empty documents dropped: {part.empty}; records without the field: "
                f"{part.missing}; lone surrogates replaced by U+FFFD: {part.surrogates}"
            )


def preprocess(options: PreprocessOptions) -> PreprocessReport:
    """Run to the end and return the report.

    DataError for bad input (file, line, reason), a field that no record has, no documents and a
    missing special token; WorkerDiedError for a worker that was killed.
    """
    if options.workers < 1:
        raise DataError(f"--workers {options.workers}: must be at least 1")
    if len(set(options.json_keys)) < len(options.json_keys):
        raise DataError(f"--json-keys {' '.join(options.json_keys)}: a field is named twice")
    sizes = [_size(path) for path in options.input]
    tokenizer = options.tokenizer()
    report = PreprocessReport(token_dtype(tokenizer.vocab_size), input_bytes=sum(sizes))
    start = time.monotonic()
    with ExitStack() as stack:
        results = _encode_all(options, stack)
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(options.prefix(key), report.dtype))
            for key in options.json_keys
        }
        progress = stack.enter_context(Progress(sum(sizes), interval=options.log_interval))
        for result in results:
            if result.error is not None:
                raise DataError(
                    f"{result.error}; mend the line, or drop such lines with --skip-bad-lines or "
                    f"--skip-missing-keys"
                )
            for key, builder in builders.items():
                _append(builder, result.fields[key])
            report.add(result)
            progress.update(result.position, documents=result.records)
        _check_documents(report, options)
        for builder in builders.values():
            builder.finalize()
    report.seconds = time.monotonic() - start
    return report


def _size(path: str) -> int:
    if Path(path).is_dir() or not Path(path).exists():
        raise DataError(f"{path}: no such file")
    return Path(path).stat().st_size  # 0 for a named pipe


def _chunks(options: PreprocessOptions) -> Iterator[Chunk]:
    """Yield the chunks of all inputs; positions run on over the files."""
    before = 0
    for path in options.input:
        for chunk in read_chunks(path):
            yield Chunk(chunk.path, chunk.first_line, chunk.lines, before + chunk.position)
        before += _size(path)


def _encode_all(options: PreprocessOptions, stack: ExitStack) -> Iterator[ChunkResult]:
    """Return the encoded chunks in input order; worker processes end with `stack`."""
    if options.workers == 1:
        return map(options.encoder(), _chunks(options))
    pool: WorkerPool[Chunk, ChunkResult] = stack.enter_context(
        WorkerPool(options.encoder, workers=options.workers)
    )
    return pool.map(_chunks(options))


def _append(builder: IndexedDatasetBuilder, part: FieldResult) -> None:
    start = 0
    for sequence_lengths in part.documents:
        stop = start + sum(sequence_lengths)
        builder.add_document(part.tokens[start:stop], sequence_lengths)
        start = stop


def _check_documents(report: PreprocessReport, options: PreprocessOptions) -> None:
    """Refuse a result in which a field has no document."""
    for key in options.json_keys:
        part = report.fields.get(key, FieldResult())
        if report.records and not part.found:
            raise DataError(
                f"field {key!r}: found in none of the {report.records} records; check --json-keys"
            )
        if not report.documents.get(key):
            raise DataError(
                f"field {key!r}: no documents: {report.records} records, {part.empty} of them "
                f"empty, bad lines skipped: {report.bad_lines}"
            )
