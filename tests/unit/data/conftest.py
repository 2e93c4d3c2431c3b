"""Token files and JSON-lines files that the data tests start from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.data.indexed_dataset import IndexedDataset


@pytest.fixture
def write_documents(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Return a function that writes documents to a new prefix and opens it."""

    def write(
        documents: Iterable[Sequence[int]], *, name: str = "corpus", dtype: Any = np.int32
    ) -> IndexedDataset:
        with IndexedDatasetBuilder(tmp_path / name, dtype) as builder:
            for document in documents:
                builder.add_document(document)
            builder.finalize()
        return IndexedDataset(tmp_path / name)

    return write


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes records (or raw lines) to a file and returns its path."""

    def write(records: Iterable[Any], *, name: str = "in.jsonl") -> str:
        path = tmp_path / name
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return str(path)

    return write
