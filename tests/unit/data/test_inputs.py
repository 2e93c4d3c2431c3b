"""Every kind of input gives the same documents; files are found in one order."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc

from megatron_lite.data import blocks as module
from megatron_lite.data.blocks import read_blocks, read_records
from megatron_lite.data.errors import DataError
from megatron_lite.data.inputs import Source, find_sources
from megatron_lite.data.jsonl import LineError

RECORDS = [{"text": f"text {n}: é \u2028 \U0001f642" * (n % 5), "id": n} for n in range(300)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def _jsonl(path: Path) -> None:
    path.write_bytes(LINES)


def _gzip(path: Path) -> None:
    half = len(LINES) // 2
    path.write_bytes(gzip.compress(LINES[:half]) + gzip.compress(LINES[half:]))


def _zstandard(path: Path) -> None:
    half = len(LINES) // 2
    packed = [zstandard.compress(part) for part in (LINES[:half], LINES[half:])]
    path.write_bytes(b"".join(packed))


def _parquet(path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=70)


def _arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=110)


def _arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    table = table.set_column(0, "text", table.column("text").cast(pa.large_string()))
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=110)


def _dictionary(path: Path) -> None:
    table = pa.Table.from_pylist(RECORDS)
    column = table.column("text").dictionary_encode()
    parquet.write_table(table.set_column(0, "text", column), path)


def _dataset(path: Path) -> None:
    datasets.Dataset.from_list(RECORDS).save_to_disk(path)


KINDS: list[tuple[str, Callable[[Path], None]]] = [
    ("a.jsonl", _jsonl),
    ("a.json.gz", _gzip),
    ("a.jsonl.zst", _zstandard),
    ("a.parquet", _parquet),
    ("b.parquet", _dictionary),
    ("a.arrow", _arrow_file),
    ("b.arrow", _arrow_stream),
    ("saved", _dataset),
]


def _contents(source: Source, *, size: int, keys: tuple[str, ...] = ("text",)) -> list[Any]:
    """Return the record contents of all blocks, after checks that each block must pass."""
    contents, positions = [], []
    for number, block in enumerate(read_blocks(source, 7, keys, size=size)):
        assert (block.place.source, block.place.number) == (7, number)
        positions.append(block.place.position)
        records, spanned = read_records(block.format, block.load())
        found = list(records)
        assert [n for n, _, _ in found] == sorted({n for n, _, _ in found})
        assert all(1 <= n <= spanned for n, _, _ in found)
        contents += [content for _, content, _ in found]
    assert positions == sorted(positions)
    assert source.size - 8 <= positions[-1] <= source.size  # 8: the end mark of an Arrow stream
    return contents


@pytest.mark.parametrize(("name", "write"), KINDS, ids=[name for name, _ in KINDS])
def test_every_kind_gives_the_same_records(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    (source,) = find_sources([str(tmp_path / name)])
    texts = [record["text"] for record in RECORDS]
    for size in (500, 1 << 20):
        assert [record["text"] for record in _contents(source, size=size)] == texts
    assert len(list(read_blocks(source, 0, ["text"], size=500))) > 5
    later = list(read_blocks(source, 0, ["text"], size=500, skip=3))
    assert later == list(read_blocks(source, 0, ["text"], size=500))[3:]


@given(
    lines=st.lists(st.sampled_from(["", "1", "x" * 7, "y" * 50, "\r"]), max_size=12),
    open_end=st.booleans(),
    size=st.integers(1, 40),
    mark=st.booleans(),
)
def test_ranges_together_are_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    open_end: bool,
    size: int,
    mark: bool,
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "x.jsonl"
    content = "\n".join(lines) + ("" if open_end else "\n")
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + content.encode())
    (source,) = find_sources([str(path)])
    parts = [block.load() for block in read_blocks(source, 0, ["text"], size=size)]
    assert b"".join(parts).decode() == content
    assert all(part.endswith(b"\n") for part in [part for part in parts if part][:-1])


def test_rows_without_a_usable_text(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", None, "b"]), "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (source,) = find_sources([str(tmp_path / "a.parquet")])
    assert _contents(source, size=100) == [{"text": "a"}, {"text": None}, {"text": "b"}]
    assert _contents(source, size=100, keys=("n",))[1] == {"n": 2}
    assert all("gone" not in row for row in _contents(source, size=100, keys=("gone",)))
    assert len(_contents(source, size=100, keys=("gone",))) == 3
    broken = pa.array([b"good", b"\xff\xfe"]).cast(pa.string(), safe=False)
    with ipc.new_file(tmp_path / "b.arrow", pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([broken], names=["text"]))
    good, bad = _contents(find_sources([str(tmp_path / "b.arrow")])[0], size=100)
    assert good == {"text": "good"}
    assert isinstance(bad, LineError) and "invalid UTF-8" in str(bad)


def test_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n two\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three\n\xff"))
    whole, packed = find_sources([str(tmp_path)])
    assert _contents(whole, size=4) == [{"text": "one\r\n\n two\n"}]
    (fault,) = _contents(packed, size=4)
    assert isinstance(fault, LineError) and "0xff at position 7" in str(fault)
    by_line, packed = find_sources([str(tmp_path)], text_documents="line")
    for size in (4, 100):
        assert _contents(by_line, size=size) == [{"text": "one"}, {"text": " two"}]
        assert _contents(packed, size=size)[0] == {"text": "three"}
    monkeypatch.setattr(module, "LARGEST_DOCUMENT", 5)
    with pytest.raises(DataError, match="--text-documents line"):
        _contents(whole, size=4)


def test_folders_and_globs_are_sorted(tmp_path: Path) -> None:
    names = ["b/2.jsonl", "b/10.jsonl", "a.txt", "b/1.parquet", ".hidden/x.jsonl", "readme.md"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(*inputs: str, **settings: str) -> list[str]:
        sources = find_sources([str(tmp_path / given) for given in inputs], **settings)
        return [str(Path(source.path).relative_to(tmp_path)) for source in sources]

    assert found("") == ["a.txt", "b/1.parquet", "b/10.jsonl", "b/2.jsonl"]
    assert found("b/*.jsonl", "a.txt") == ["b/10.jsonl", "b/2.jsonl", "a.txt"]
    assert found("**/*.txt") == ["a.txt"]
    assert found("readme.md") == ["readme.md"]
    assert "readme.md" in found("", format="text")
    assert find_sources([str(tmp_path / "readme.md")])[0].format == "jsonl"
    for missing, reason in (("gone", "no such file"), ("*.zip", "holds none of the files")):
        with pytest.raises(DataError, match=reason):
            found(missing)
    (tmp_path / "x.parquet.gz").touch()
    with pytest.raises(DataError, match="unpack it"):
        found("x.parquet.gz")


def test_splits_must_be_named(tmp_path: Path) -> None:
    part = datasets.Dataset.from_list(RECORDS[:3])
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match=r"several splits; name those to read: .*test .*train"):
        find_sources([str(tmp_path / "d")])
    (source,) = find_sources([str(tmp_path / "d/train")])
    assert len(_contents(source, size=100)) == 3


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl.zst", zstandard.compress(LINES)[:-9], "damaged zstandard data after line"),
        ("a.jsonl.zst", b"not packed", "damaged zstandard data after line 0"),
        ("a.parquet", b"PAR1 nothing", "can't be read as parquet after record 0"),
        ("a.arrow", b"nothing at all", "can't be read as arrow after record 0"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    (source,) = find_sources([str(tmp_path / name)])
    with pytest.raises(DataError, match=f"{name}: {reason}"):
        _contents(source, size=500)
