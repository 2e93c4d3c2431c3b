"""Descriptions and checks of token files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.inspection import check, describe, differences, scan
from megatron_lite.data.tokenizer import ByteTokenizer, NullTokenizer

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


def test_documents_and_their_ends_are_counted(write_documents: WriteDocuments) -> None:
    prefix = write_documents([[5, 9], [9, 9], [], [1, 2], [9]]).prefix
    for tokenizer, name in ((None, "commonest last token"), (NullTokenizer(10), "end of document")):
        text = "\n".join(describe(prefix, tokenizer=tokenizer))
        assert f"9 ({name}) ends 3 of 5 documents and comes 1 times elsewhere" in text


@pytest.mark.parametrize(("tokens", "documents"), [(1, 1), (3, 2), (100, 100)])
def test_blocks_join(
    write_documents: WriteDocuments, monkeypatch: pytest.MonkeyPatch, tokens: int, documents: int
) -> None:
    monkeypatch.setattr("megatron_lite.data.inspection._BLOCK", tokens)
    monkeypatch.setattr("megatron_lite.data.inspection._DOCUMENTS", documents)
    dataset = write_documents([[3, 1], [], [4, 1], [5], [], [9, 2, 1]])
    found = scan(dataset)
    assert (found.lowest, found.highest, found.empties, found.empty) == (1, 9, 2, [1])
    assert found.last_tokens == {1: 3, 5: 1} and found.end == 1 and found.occurrences == 3
    changed = write_documents([[3, 1], [], [4, 1], [5], [], [9, 7, 1]], name="changed")
    assert list(differences(dataset.prefix, changed.prefix)) == ["token 1 of document 5: 2, 7"]


def test_what_differs_is_named(write_documents: WriteDocuments) -> None:
    one = write_documents([[1, 2], [3]], dtype=np.uint16).prefix
    assert list(differences(one, one)) == []
    wide = write_documents([[1, 2], [3]], name="wide").prefix
    assert list(differences(one, wide)) == ["stored as uint16, int32"]
    longer = write_documents([[1], [2, 3], [4]], name="longer", dtype=np.uint16).prefix
    assert list(differences(one, longer)) == [
        "documents: 2, 3",
        "tokens: 3, 4",
        "document 0: 2 tokens, 1",
    ]


def test_checks(write_documents: WriteDocuments) -> None:
    check(write_documents([[1, 2]]).prefix, vocab_size=3)
    with pytest.raises(DataError, match=r"1 of 3 documents do not end in the .* token 7"):
        check(write_documents([[1, 7], [2], [7]], name="unended").prefix, eod=7)
    check(write_documents([[1, 7], [2], [3]], name="chance").prefix, eod=7)
    with pytest.raises(DataError, match="1 empty documents, the first is 1"):
        check(write_documents([[1], [], [2]], name="empty").prefix)
    with pytest.raises(DataError, match="negative token id -4"):
        check(write_documents([[1], [-4]], name="negative").prefix)
    with pytest.raises(DataError, match="token id 300, but the vocabulary has 257 ids"):
        check(write_documents([[300]], name="large").prefix, vocab_size=257)
