"""The .bin/.idx pair: layout, writing in one go, refusal of what doesn't fit."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.errors import DataError
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder, token_dtype
from megatron_lite.data.indexed_dataset import IndexedDataset, byte_offsets


def _write(prefix: Path, documents: list[list[int]], dtype: object = np.uint16) -> None:
    with IndexedDatasetBuilder(prefix, dtype) as builder:  # type: ignore[arg-type]
        for document in documents:
            builder.add_document(document)
        builder.finalize()


def test_the_bytes_are_megatrons(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        builder.add_document([1, 2, 3, 4, 5], sequence_lengths=[2, 3])
        builder.add_document([60000])
        builder.finalize()
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 60000)
    assert (tmp_path / "d.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)  # uint16
        + struct.pack("<QQ", 3, 3)
        + struct.pack("<3i", 2, 3, 1)
        + struct.pack("<3q", 0, 4, 10)
        + struct.pack("<3q", 0, 2, 3)
    )


@pytest.mark.parametrize(
    ("dtype", "code"), [("u1", 1), ("i1", 2), ("i2", 3), ("i4", 4), ("i8", 5), ("u2", 8)]
)
def test_every_integer_type_comes_back(tmp_path: Path, dtype: str, code: int) -> None:
    top = int(np.iinfo(dtype).max)
    _write(tmp_path / "d", [[0, 1, top], [7]], dtype)
    dataset = IndexedDataset(tmp_path / "d")
    assert (tmp_path / "d.idx").read_bytes()[17] == code
    assert [sequence.tolist() for sequence in (dataset[0], dataset[-1])] == [[0, 1, top], [7]]
    assert dataset.get(0, 1, 2).tolist() == [1, top]
    assert dataset.sequence_lengths.dtype == np.int32
    assert dataset.document_indices.tolist() == [0, 1, 2]
    assert dataset.num_tokens == 4


def test_b02_offsets_are_64_bit() -> None:
    offsets = byte_offsets(np.array([1_500_000_000, 1_500_000_000], dtype=np.int32), 2)
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 3_000_000_000, 6_000_000_000]


def test_the_type_follows_the_vocabulary() -> None:
    assert [token_dtype(size).name for size in (65_499, 65_500)] == ["uint16", "int32"]


def test_reading_outside_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "d", [[1, 2], [3, 4]])
    dataset = IndexedDataset(tmp_path / "d")
    for call in (lambda: dataset[2], lambda: dataset.get(0, 1, 2), lambda: dataset.get(-1)):
        with pytest.raises(IndexError):
            call()


def test_documents_join_sequences(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        builder.add_document([])
        builder.add_document([1, 2, 3], sequence_lengths=[1, 2])
        builder.add_document([4, 5])
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "d")
    assert [dataset.document_start(document) for document in range(4)] == [0, 0, 3, 5]
    assert dataset.document_lengths(0, 3).tolist() == [0, 3, 2]
    assert dataset.document_lengths(1, 2).tolist() == [3]


def test_one_sequence_a_document_is_read_from_the_file(tmp_path: Path) -> None:
    _write(tmp_path / "d", [[1, 2], [3], [4, 5, 6]])
    dataset = IndexedDataset(tmp_path / "d")
    lengths = dataset.document_lengths(1, 3)
    assert lengths.tolist() == [1, 3] and np.shares_memory(lengths, dataset.sequence_lengths)


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_blocks_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Checks and lengths don't depend on how much is read at once."""
    for module in ("index_check", "indexed_dataset"):
        monkeypatch.setattr(f"megatron_lite.data.{module}._BLOCK", block)
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        for cuts in ([2, 1], [], [3], [1, 1, 1], [4]):
            builder.add_document(np.arange(sum(cuts)), sequence_lengths=cuts)
        builder.finalize()
    assert IndexedDataset(tmp_path / "d").document_lengths(0, 5).tolist() == [3, 0, 3, 3, 4]
    _write(tmp_path / "e", [[1, 2], [3], [4, 5, 6]])
    _patch(tmp_path / "e.idx", 34 + 12 + 16, b"\x08")  # the last pointer
    with pytest.raises(DataError, match="pointers don't follow"):
        IndexedDataset(tmp_path / "e")


def test_a_pickled_dataset_reads_the_same(tmp_path: Path) -> None:
    _write(tmp_path / "d", [[1, 2], [3]])
    copy = pickle.loads(pickle.dumps(IndexedDataset(tmp_path / "d")))
    assert [sequence.tolist() for sequence in (copy[0], copy[1])] == [[1, 2], [3]]


def _patch(path: Path, position: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: _patch(p / "d.idx", 0, b"X"), "magic"),
        (lambda p: _patch(p / "d.idx", 9, b"\x02"), "version 2"),
        (lambda p: _patch(p / "d.idx", 17, b"\x09"), "dtype code 9"),
        (lambda p: _patch(p / "d.idx", 18, b"\x05"), "truncated"),
        (lambda p: _patch(p / "d.idx", 34, b"\x01"), "pointers"),
        (lambda p: _patch(p / "d.idx", 34 + 24, b"\x01"), "document indices"),
        (lambda p: (p / "d.bin").write_bytes(b"\x01\x00"), "d.bin: 2 bytes"),
        (lambda p: (p / "d.bin").unlink(), "d.bin: no such file"),
        (lambda p: (p / "d.idx").unlink(), "d.idx: no such file"),
        (lambda p: (p / "d.idx").write_bytes(b""), "magic"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: object, message: str) -> None:
    _write(tmp_path / "d", [[1, 2], [3]])
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "d")


def test_nothing_is_published_before_the_end(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "new" / "d", np.int32) as builder:
        builder.add_document([1, 2])
        assert not list((tmp_path / "new").glob("*.bin")) + list((tmp_path / "new").glob("*.idx"))
    assert list((tmp_path / "new").iterdir()) == []  # left without finalize: aborted


def test_an_exception_keeps_the_older_pair(tmp_path: Path) -> None:
    _write(tmp_path / "d", [[1, 2]])
    with (
        pytest.raises(RuntimeError, match="boom"),
        IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder,
    ):
        builder.add_document([9])
        raise RuntimeError("boom")
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_leftovers_of_a_killed_run_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "d.bin.partial").write_bytes(b"rubbish")
    _write(tmp_path / "d", [[5]])
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [5]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        builder.add_document([1])
        with pytest.raises(DataError, match="another process"):
            IndexedDatasetBuilder(tmp_path / "d", np.int32)
        builder.finalize()
    assert IndexedDataset(tmp_path / "d")[0].tolist() == [1]


@pytest.mark.parametrize("tokens", [[65_536], [-1], np.array([70_000])])
def test_a_token_out_of_range_is_refused(tmp_path: Path, tokens: list[int]) -> None:
    with (
        IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder,
        pytest.raises(DataError, match="outside 0 … 65535"),
    ):
        builder.add_document(tokens)


def test_floats_and_wrong_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="float32"):
        IndexedDatasetBuilder(tmp_path / "d", np.float32)
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder, pytest.raises(ValueError):
        builder.add_document([1, 2], sequence_lengths=[1])
