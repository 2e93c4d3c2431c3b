"""Writing a single output file so that its name never shows a half-written one.

The .bin/.idx pair has its own writer, indexed_builder. Called by corpus and
sentencepiece_training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron_lite.data.errors import DataError


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the name `path` when the block ends without an exception.

    Creates missing folders; DataError when the place can't be written.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("wb")
    except OSError as error:
        raise DataError(f"{target}: can't be written: {error.strerror}") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
