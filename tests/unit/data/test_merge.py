"""Pairs joined into one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import merge as module
from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.merge import find_pairs, merge

WriteDocuments = Callable[..., IndexedDataset]


@pytest.mark.parametrize("block", [1, 2, 1000])
def test_merging_is_writing_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Byte for byte, with documents of several sequences, empty ones and an empty pair."""
    monkeypatch.setattr(module, "_BLOCK", block)
    parts: list[list[list[int]]] = [[[2, 1], [], [3]], [], [[1], [4, 1, 2], [0, 5]]]
    with IndexedDatasetBuilder(tmp_path / "whole", np.uint16) as whole:
        for number, part in enumerate(parts):
            with IndexedDatasetBuilder(tmp_path / f"in/{number}", np.uint16) as builder:
                for lengths in part:
                    tokens = np.arange(sum(lengths)) + 100 * number
                    whole.add_document(tokens, lengths)
                    builder.add_document(tokens, lengths)
                builder.finalize()
        whole.finalize()
    prefixes = find_pairs([str(tmp_path / "in")])
    merged = merge(prefixes, str(tmp_path / "new/merged"))
    assert merged.num_documents == 6
    for end in ("bin", "idx"):
        one, other = (tmp_path / f"{name}.{end}" for name in ("whole", "new/merged"))
        assert one.read_bytes() == other.read_bytes()
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["merged.bin", "merged.idx"]


def test_inputs_in_their_order(write_documents: WriteDocuments, tmp_path: Path) -> None:
    for name in ("b", "a", "c10", "c9"):
        write_documents([[1]], name=name)
    prefixes = [str(tmp_path / name) for name in ("a", "b", "c10", "c9")]
    assert find_pairs([str(tmp_path)]) == prefixes
    assert find_pairs(prefixes[::-1]) == prefixes[::-1]
    with pytest.raises(DataError, match="a: given twice"):
        find_pairs([prefixes[0], str(tmp_path)])
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none: no .bin/.idx pair is there"):
        find_pairs([str(tmp_path / "none")])


def test_what_does_not_fit_is_refused_and_leaves_nothing(
    write_documents: WriteDocuments, tmp_path: Path
) -> None:
    narrow = write_documents([[1, 2]], name="narrow", dtype=np.uint16).prefix
    wide = write_documents([[1, 2]], name="wide").prefix
    (tmp_path / "half.idx").write_bytes((tmp_path / "wide.idx").read_bytes())
    before = sorted(tmp_path.iterdir())
    for inputs, message in (
        ([narrow, wide], "wide: stores int32, but .*narrow uint16"),
        ([wide, str(tmp_path / "half")], "half.bin: no such file"),
        ([wide, str(tmp_path / "out")], "out: lies among the inputs"),
    ):
        with pytest.raises(DataError, match=message):
            merge(inputs, str(tmp_path / "out"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_merge_keeps_the_older_pair(
    write_documents: WriteDocuments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = write_documents([[1, 2]], name="old"), write_documents([[7]], name="new")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        merge([new.prefix], old.prefix)
    assert IndexedDataset(old.prefix)[0].tolist() == [1, 2]
    assert not list(tmp_path.glob("*.partial"))


def test_a_second_writer_is_refused(write_documents: WriteDocuments, tmp_path: Path) -> None:
    prefix = write_documents([[1, 2]]).prefix
    with IndexedDatasetBuilder(tmp_path / "out", np.int32) as builder:
        builder.add_document([1])
        with pytest.raises(DataError, match="another process is writing"):
            merge([prefix], str(tmp_path / "out"))
        builder.finalize()
    assert IndexedDataset(tmp_path / "out")[0].tolist() == [1]
