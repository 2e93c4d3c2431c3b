"""What --input names → the files to read, in order: files, folders, globs, data sets on disk.

Opens nothing but folders. Called by preprocess and by the training of tokenizers.
"""

from __future__ import annotations

import glob
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.data.errors import DataError
from megatron_lite.data.streams import packing

FORMATS = ("jsonl", "text", "parquet", "arrow")
TEXT_DOCUMENTS = ("file", "line")
_SUFFIXES = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "text": (".txt", ".text"),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
}
_BY_SUFFIX = {suffix: format for format, suffixes in _SUFFIXES.items() for suffix in suffixes}
_DATASET_MARK = "dataset_info.json"  # written by save_to_disk of the package `datasets`
_SPLITS_MARK = "dataset_dict.json"


@dataclass(frozen=True)
class Source:
    """One input file, or one data set saved by `datasets` (a folder)."""

    path: str
    format: str
    """One of FORMATS, "text-lines" for a text whose lines are documents, or "dataset"."""
    size: int
    """Bytes on disk; 0 for a named pipe."""
    modified: int
    """Time of the last change, in nanoseconds."""
    regular: bool
    """False for a named pipe, which can be read only once."""


def find_sources(
    inputs: Sequence[str], *, format: str = "auto", text_documents: str = "file"
) -> list[Source]:
    """Return the files of all inputs: each input's in sorted order, the inputs as they are given.

    A file's format follows from its name (JSON lines where the name says nothing), or is `format`;
    folders and globs give the files whose name says a format. DataError for what doesn't exist and
    for a folder or glob without such files.
    """
    sources: list[Source] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            sources += _folder(path, format, text_documents)
        elif path.exists():
            sources.append(_source(path, _format(path, format) or "jsonl", text_documents))
        elif glob.has_magic(given):
            sources += _glob(given, format, text_documents)
        else:
            raise DataError(f"{given}: no such file")
    return sources


def _format(path: Path, format: str) -> str | None:
    if format != "auto":
        return format
    unpacked = path.with_suffix("") if packing(path) else path
    return _BY_SUFFIX.get(unpacked.suffix.lower())


def _source(path: Path, format: str, text_documents: str) -> Source:
    facts = path.stat()
    if packing(path) and format in ("parquet", "arrow"):
        raise DataError(f"{path}: {format} inside another packing can't be read; unpack it")
    if format == "text" and text_documents == "line":
        format = "text-lines"
    regular = stat.S_ISREG(facts.st_mode)
    return Source(str(path), format, facts.st_size, facts.st_mtime_ns, regular)


def _folder(folder: Path, format: str, text_documents: str) -> Iterator[Source]:
    """Yield the files below a folder, or the one data set that it is."""
    if (folder / _SPLITS_MARK).is_file():
        splits = sorted(str(mark.parent) for mark in folder.glob(f"*/{_DATASET_MARK}"))
        raise DataError(f"{folder}: holds several splits; name those to read: {' '.join(splits)}")
    if (folder / _DATASET_MARK).is_file():
        files = [path.stat() for path in folder.iterdir() if path.is_file()]
        size, modified = sum(f.st_size for f in files), max(f.st_mtime_ns for f in files)
        yield Source(str(folder), "dataset", size, modified, regular=True)
        return
    paths = [p for p in folder.rglob("*") if p.is_file() and not _hidden(p.relative_to(folder))]
    yield from _known(str(folder), paths, format, text_documents)


def _glob(pattern: str, format: str, text_documents: str) -> Iterator[Source]:
    paths = map(Path, glob.glob(pattern, recursive=True))
    yield from _known(pattern, [p for p in paths if not p.is_dir()], format, text_documents)


def _known(given: str, paths: list[Path], format: str, text_documents: str) -> Iterator[Source]:
    known = [(path, name) for path in sorted(paths) if (name := _format(path, format))]
    if not known:
        suffixes = ", ".join(_BY_SUFFIX)
        raise DataError(
            f"{given}: holds none of the files that can be read ({suffixes}, .gz and .zst of "
            f"texts); {len(paths)} others; --input-format takes them whatever their name"
        )
    for path, name in known:
        yield _source(path, name, text_documents)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
