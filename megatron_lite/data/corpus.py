"""A small corpus that every machine has: the sources and the manual of Python's standard library.

Deterministic for one Python version. Called by tools/make_corpus.py, for the quickstart and tests.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lite.data.errors import DataError
from megatron_lite.data.files import atomic_writer

_SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__")
)
_MANUAL = "pydoc_data/topics.py"  # one literal: {topic: text}

# A document may end at a blank line; from how many characters on depends on what follows it.
_CUT_BEFORE_TOP_LEVEL = 4_000
_CUT_BEFORE_METHOD = 12_000
_CUT_ANYWHERE = 24_000


class CorpusReport(NamedTuple):
    """What was written."""

    documents: int
    files: int
    bytes: int
    skipped: int


def split_source(text: str) -> Iterator[str]:
    """Cut a source text at blank lines into documents that together are the text."""
    document: list[str] = []
    size = 0
    after_blank = False
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip())
        limit = (
            _CUT_BEFORE_TOP_LEVEL
            if indent == 0
            else _CUT_BEFORE_METHOD
            if indent <= 4
            else _CUT_ANYWHERE
        )
        if after_blank and line.strip() and size >= limit:
            yield "".join(document)
            document, size = [], 0
        document.append(line)
        size += len(line)
        after_blank = not line.strip()
    if document:
        yield "".join(document)


def _sources(root: Path) -> list[Path]:
    """Return the library's source files in an order that is the same everywhere."""
    return sorted(
        (
            path
            for path in root.rglob("*.py")
            if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
            and not path.name.startswith("_sysconfigdata")  # names this machine's folders
        ),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def _manual_topics(source: str) -> Iterator[str]:
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            topics = ast.literal_eval(statement.value)
            yield from (topics[name] for name in sorted(topics))


def make_corpus(output: str | Path, *, root: str | Path | None = None) -> CorpusReport:
    """Write JSON lines {"text", "source"} of a library folder (default: the running Python's).

    Files that aren't UTF-8 are skipped and counted. DataError when the folder holds no sources.
    """
    folder = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    paths = _sources(folder)
    if not paths:
        raise DataError(f"{folder}: holds no Python sources; this Python has no library files")
    documents = written = skipped = 0
    with atomic_writer(output) as file:
        for path in paths:
            name = path.relative_to(folder).as_posix()
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                skipped += 1
                continue
            for piece in _manual_topics(text) if name == _MANUAL else split_source(text):
                if piece.strip():
                    record = json.dumps({"text": piece, "source": name}, ensure_ascii=False)
                    written += file.write(record.encode("utf-8") + b"\n")
                    documents += 1
    return CorpusReport(documents, len(paths) - skipped, written, skipped)
