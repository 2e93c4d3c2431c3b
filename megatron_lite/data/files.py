"""Writing a single output file so that its name never shows a half-written one.

The .bin/.idx pair has its own writer, indexed_builder. Called by whatever in data/ writes a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron_lite.command import reason
from megatron_lite.data.errors import DataError


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an OSError that names no file this one; the writes that meet a full disk name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def require_file(path: str | Path) -> None:
    """DataError for a folder, and for a device, which root could replace by a file."""
    target = Path(path)
    if target.exists() and not target.is_file():
        what = "a folder" if target.is_dir() else "no file"
        raise DataError(f"{target}: is {what}; name the file to write")


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the name `path` when the block ends without an exception.

    Creates missing folders; DataError when the place can't be written, or holds no file.
    """
    require_file(path)
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb")
    except OSError as error:
        raise DataError(f"{target}: can't be written: {reason(error)}") from error
    try:
        with naming(target):
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
