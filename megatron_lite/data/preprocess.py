"""Texts → .bin/.idx pairs, one a field, with the same bytes for any number of workers.

Called by tools/preprocess_data.py. Every pair appears under its final name when all are whole. A
run that ends early leaves its work beside the output, and the same options go on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace

from megatron_lite.data.blocks import Block, read_blocks
from megatron_lite.data.encoding import BlockEncoder, BlockResult
from megatron_lite.data.engine import Engine, NativeEngine, choose_engine
from megatron_lite.data.errors import DataError
from megatron_lite.data.files import naming
from megatron_lite.data.indexed_builder import token_dtype
from megatron_lite.data.inputs import Source
from megatron_lite.data.preprocess_options import PreprocessOptions
from megatron_lite.data.preprocess_report import FieldCounts, PreprocessReport, located
from megatron_lite.data.progress import Progress
from megatron_lite.data.tokenizer_base import Tokenizer
from megatron_lite.data.work_folder import State, WorkFolder
from megatron_lite.data.worker_pool import WorkerPool


@dataclass
class _Position:
    """Where a run stands: before which block, and what holds from there on."""

    source: int = 0
    block: int = 0
    lines: int = 0
    """Lines or records of the file before that block."""
    bytes: int = 0
    """Bytes of the file before it."""
    native: bool = False
    """True after the engine's first disagreement with the tokenizer."""


@dataclass
class _Run:
    options: PreprocessOptions
    sources: Sequence[Source]
    tokenizer: Tokenizer
    engine: Engine
    report: PreprocessReport
    position: _Position = field(default_factory=_Position)
    started: float = field(default_factory=time.monotonic)

    def go_on(self, state: State) -> None:
        """Stand where an earlier run stood; its time counts as well."""
        self.position = _Position(**state["position"])
        self.report = PreprocessReport.from_dict(state["report"])
        self.started -= self.report.seconds

    def encoder(self) -> BlockEncoder:
        """Return what one process needs to encode blocks."""
        options = self.options
        return BlockEncoder(
            self.tokenizer,
            NativeEngine(self.tokenizer) if self.position.native else self.engine,
            options.json_keys,
            token_dtype(self.tokenizer.vocab_size),
            prepend_bos=options.prepend_bos,
            append_eod=options.append_eod,
            sentences=options.split_sentences,
            skip_bad_lines=options.skip_bad_lines,
            skip_missing_keys=options.skip_missing_keys,
            check_every=options.check_every,
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks from the position on."""
        skip = self.position.block
        for index in range(self.position.source, len(self.sources)):
            yield from read_blocks(
                self.sources[index],
                index,
                self.options.json_keys,
                size=self.options.block_bytes,
                skip=skip,
            )
            skip = 0

    def results(self, stack: ExitStack) -> Iterator[BlockResult]:
        """Return the encoded blocks in input order; worker processes end with `stack`."""
        if self.options.workers == 1:
            return map(self.encoder(), self.blocks())
        pool: WorkerPool[Block, BlockResult] = stack.enter_context(
            WorkerPool(self.encoder, workers=self.options.workers)
        )
        return pool.map(self.blocks())

    def take(self, result: BlockResult) -> Callable[[], State]:
        """Move on past a block; returns what tells the state from which a run can go on.

        DataError where the block has a fault that may not be skipped.
        """
        if result.place.source != self.position.source:
            self.position = replace(self.position, source=result.place.source, lines=0, bytes=0)
        lines = self.position.lines
        if result.error is not None:
            raise DataError(
                f"{located(result, lines, *result.error)}; mend the line, or drop such lines with "
                f"--skip-bad-lines or --skip-missing-keys"
            )
        if result.disagreement is not None and self.options.tokenizer_engine == "gigatoken":
            raise DataError(
                f"{located(result, lines, *result.disagreement)}; use --tokenizer-engine auto or "
                f"native"
            )
        self.report.add(result, lines)
        self.report.seconds = time.monotonic() - self.started
        self.position = _Position(
            self.position.source,
            result.place.number + 1,
            lines + result.lines,
            result.place.position,
            self.position.native or result.disagreement is not None,
        )
        position, report = self.position, self.report.copy()  # an interrupt may come at any time
        return lambda: {"position": asdict(position), "report": asdict(report)}


def preprocess(options: PreprocessOptions) -> PreprocessReport:
    """Run to the end, or go on to it from where the same options were stopped; return the report.

    DataError for bad input (file, line, reason), a field that no record has, no documents, a
    missing special token and work of other options; WorkerDiedError for a worker that was killed.
    """
    options.check()
    sources = options.sources()
    tokenizer = options.tokenizer()
    engine, remark = choose_engine(options.tokenizer_engine, tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    size = sum(source.size for source in sources)
    report = PreprocessReport(engine=remark, dtype=dtype.name, input_bytes=size)
    run = _Run(options, sources, tokenizer, engine, report)
    with (
        WorkFolder(
            options.work_folder(),
            options.identity(sources, tokenizer, engine),
            options.json_keys,
            restart=options.restart,
            resumable=all(source.regular for source in sources),
        ) as work,
        naming(options.work_folder()),
    ):
        if work.state is not None:
            run.go_on(work.state)
        if not work.complete:
            _encode(run, work)
            _check_documents(run.report, options)
        work.publish(options.prefixes(), dtype)
    run.report.seconds = time.monotonic() - run.started
    return run.report


def _encode(run: _Run, work: WorkFolder) -> None:
    """Encode what remains; after a disagreement again from the next block, with the tokenizer."""
    before = [0]
    for source in run.sources:
        before.append(before[-1] + source.size)
    begun = before[run.position.source] + run.position.bytes
    with Progress(before[-1], interval=run.options.log_interval, begun=begun) as progress:
        finished = False
        while not finished:
            native = run.position.native
            with ExitStack() as stack:
                for result in run.results(stack):
                    state = run.take(result)
                    work.append(result.fields, state)
                    progress.update(
                        before[result.place.source] + result.place.position,
                        documents=result.records,
                        tokens=sum(len(part.tokens) for part in result.fields.values()),
                    )
                    work.commit_if_due(run.options.commit_seconds)
                    if run.position.native != native:
                        break
                else:
                    finished = True
            work.wait()  # no commit may be under way when processes are made


def _check_documents(report: PreprocessReport, options: PreprocessOptions) -> None:
    """Refuse a result in which a field has no document."""
    for key in options.json_keys:
        part = report.fields.get(key, FieldCounts())
        if report.records and not part.found:
            raise DataError(
                f"field {key!r}: found in none of the {report.records} records; check --json-keys"
            )
        if not part.documents:
            raise DataError(
                f"{' '.join(options.input)}: no documents in field {key!r}: {report.records} "
                f"records, {part.empty} of them empty, bad lines skipped: {report.bad_lines}"
            )
