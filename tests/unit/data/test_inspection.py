"""Descriptions and checks of token files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.inspection import check, describe
from megatron_lite.data.tokenizer import ByteTokenizer

WriteDocuments = Callable[..., IndexedDataset]


def test_a_description_has_the_facts(write_documents: WriteDocuments) -> None:
    prefix = write_documents([list(b"hello"), [120] * 100], dtype=np.uint16).prefix
    text = "\n".join(describe(prefix, show=5, tokenizer=ByteTokenizer()))
    assert "MMIDIDX version 1, uint16" in text
    assert "tokens       105 (210 bytes)" in text
    assert "token range  101 to 120" in text
    assert "min 5, median 52, mean 52.5, max 100" in text
    assert "document 0: 5 tokens\n  'hello'" in text
    assert "document 1: 100 tokens, the first 64\n" in text and text.endswith("… 36 more")
    assert "  104 101 108 108 111" in "\n".join(describe(prefix, show=1))


def test_an_empty_file_is_described(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "e", np.int32) as builder:
        builder.finalize()
    assert "token range  no tokens" in list(describe(str(tmp_path / "e")))


def test_checks(write_documents: WriteDocuments) -> None:
    check(write_documents([[1, 2]]).prefix, tokenizer=ByteTokenizer())
    with pytest.raises(DataError, match="1 empty documents, the first is 1"):
        check(write_documents([[1], [], [2]], name="empty").prefix)
    with pytest.raises(DataError, match="negative token id -4"):
        check(write_documents([[1], [-4]], name="negative").prefix)
    with pytest.raises(DataError, match="token id 300, but ByteTokenizer has 257"):
        check(write_documents([[300]], name="large").prefix, tokenizer=ByteTokenizer())
