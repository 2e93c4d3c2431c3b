"""JSON lines → token files: counts, refusals, workers."""

from __future__ import annotations

import gzip
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.data import preprocess_options as module
from megatron_lite.data.errors import DataError, WorkerDiedError
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.preprocess_options import PreprocessOptions
from megatron_lite.data.preprocess_report import PreprocessReport
from megatron_lite.data.tokenizer import ByteTokenizer
from megatron_lite.data.tokenizer_base import TokenBatch

WriteJsonl = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., PreprocessReport]:
    """Return a function that preprocesses into tmp_path/out/x with the byte tokenizer."""

    def call(path: str, *, out: str = "x", **changes: Any) -> PreprocessReport:
        values = {"tokenizer_type": "ByteTokenizer"} | changes
        return preprocess(PreprocessOptions([path], str(tmp_path / "out" / out), **values))

    return call


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _texts(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    return [ByteTokenizer().detokenize(dataset[i].tolist()) for i in range(len(dataset))]


FIVE = [{"text": text} for text in ("", "1 2", "  \t\n", "3", "")]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(("eod", "lengths"), [(True, [3, 2]), (False, [2, 1])])
def test_b01_empty_records(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, workers: int, eod: bool, lengths: list[int]
) -> None:
    report = run(
        write_jsonl(FIVE),
        tokenizer_type="NullTokenizer",
        vocab_size=10,
        append_eod=eod,
        workers=workers,
    )
    prefix = tmp_path / "out" / "x_text_document"
    dataset = IndexedDataset(prefix)
    assert report.fields["text"].empty == 3
    assert any("empty documents dropped: 3" in line for line in report.lines({"text": "x"}))
    assert dataset.sequence_lengths.tolist() == lengths
    assert dataset.document_indices.tolist() == [0, 1, 2]
    assert Path(f"{prefix}.bin").stat().st_size == sum(lengths) * dataset.dtype.itemsize
    assert [dataset[i][-1] == 9 for i in range(2)] == [eod, eod]


def test_b01_blank_texts_are_empty_for_every_tokenizer(run: Any, write_jsonl: WriteJsonl) -> None:
    report = run(write_jsonl(FIVE))
    assert (report.fields["text"].documents, report.fields["text"].empty) == (2, 3)


@pytest.mark.parametrize("records", [[{"text": ""}, {"text": " "}], []])
def test_b01_only_empty_input(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, records: list[Any]
) -> None:
    path = write_jsonl(records)
    with pytest.raises(DataError, match=f"^{path}: no documents"):
        run(path)
    assert list((tmp_path / "out").iterdir()) == []


def test_worker_count_never_changes_the_bytes(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl
) -> None:
    path = write_jsonl({"text": f"record {n} " * (n % 7)} for n in range(300))
    outputs = []
    for workers in (1, 2, 4):
        run(path, out=f"w{workers}/x", workers=workers, append_eod=True, block_bytes=200)
        outputs.append(_bytes(tmp_path / "out" / f"w{workers}"))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0]) == 2


GOOD = [b'{"text": "fine"}'] * 20
BAD = [
    ("pretty", [b"{", b'  "text": "x"', b"}"], 21, "not a whole JSON object"),
    ("two", [b'{"text": "a"} {"text": "b"}'], 21, "more than one JSON value"),
    (
        "byte",
        [b'{"text": "a"}', b'{"text": "\xff"}'],
        22,
        "invalid UTF-8: byte 0xff at position 11",
    ),
    ("array", [b"[1]"], 21, "an array instead of a JSON object"),
    ("number", [b'{"text": 5}'], 21, "field 'text' is a number, not a text"),
    ("deep", [b'{"text": ' + b"[" * 100_000], 21, "JSON"),
]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize(
    ("lines", "number", "reason"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_b04_bad_lines_are_named(
    tmp_path: Path,
    run: Any,
    write_jsonl: WriteJsonl,
    workers: int,
    lines: list[bytes],
    number: int,
    reason: str,
) -> None:
    path = write_jsonl(GOOD + lines + GOOD)
    with pytest.raises(DataError) as caught:
        run(path, workers=workers, block_bytes=200)
    assert f"{path}: line {number}: {reason}" in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_b04_bad_lines_can_be_skipped(tmp_path: Path, run: Any, write_jsonl: WriteJsonl) -> None:
    report = run(write_jsonl([b'{"text": "a"}', b"{", b'{"text": "b"}']), skip_bad_lines=True)
    assert report.bad_lines == 1
    assert _texts(tmp_path / "out" / "x_text_document") == ["a", "b"]


@pytest.mark.parametrize("workers", [1, 4])
def test_b04_mark_gzip_and_line_ends_change_nothing(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, workers: int
) -> None:
    content = b'{"text": "a"}\n\n{"text": "b"}\n'
    files = {"plain": content, "mark": b"\xef\xbb\xbf" + content}
    files |= {"crlf": content.replace(b"\n", b"\r\n"), "open": content.rstrip(b"\n")}
    outputs = []
    for name, data in files.items():
        (tmp_path / f"{name}.jsonl").write_bytes(data)
        run(str(tmp_path / f"{name}.jsonl"), out=f"{name}/x", workers=workers)
        outputs.append(_bytes(tmp_path / "out" / name))
    packed = tmp_path / "plain.jsonl.gz"
    packed.write_bytes(gzip.compress(content))
    run(str(packed), out="gz/x", workers=workers)
    outputs.append(_bytes(tmp_path / "out" / "gz"))
    assert all(output == outputs[0] for output in outputs)
    assert _texts(tmp_path / "out" / "plain" / "x_text_document") == ["a", "b"]


def test_b04_damaged_gzip_is_named(tmp_path: Path, run: Any) -> None:
    content = b"".join(b'{"text": "%d"}\n' % n for n in range(500))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(content)[:-20])
    with pytest.raises(DataError, match=r"cut.jsonl.gz: damaged gzip data after line"):
        run(str(path))
    path.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match=r"damaged gzip data after line 0"):
        run(str(path))


@pytest.mark.parametrize("workers", [1, 4])
def test_b04_odd_characters_survive(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, workers: int
) -> None:
    text = "a\u2028b \U0001f642 日本語\u0085"
    report = run(
        write_jsonl([f'{{"text": "{text}"}}'.encode(), b'{"text": "x\\ud800y"}']), workers=workers
    )
    assert _texts(tmp_path / "out" / "x_text_document") == [text, "x\ufffdy"]
    assert report.fields["text"].surrogates == 1


FIELDS = [{"text": "t0", "code": "c0"}, {"text": "t1"}, {"text": "t2", "code": None}]


def test_b05_a_missing_field_is_named(tmp_path: Path, run: Any, write_jsonl: WriteJsonl) -> None:
    path = write_jsonl(FIELDS)
    with pytest.raises(DataError, match=r"in.jsonl: line 2: field 'code' is missing"):
        run(path, json_keys=["text", "code"])
    with pytest.raises(DataError, match=r"in.jsonl: line 1: field 'code' is null"):
        run(write_jsonl(FIELDS[2:]), json_keys=["code"])
    assert list((tmp_path / "out").iterdir()) == []


def test_b05_every_field_gets_its_own_pair(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl
) -> None:
    report = run(write_jsonl(FIELDS), json_keys=["text", "code"], skip_missing_keys=True)
    assert _texts(tmp_path / "out" / "x_text_document") == ["t0", "t1", "t2"]
    assert _texts(tmp_path / "out" / "x_code_document") == ["c0"]
    assert (report.fields["text"].missing, report.fields["code"].missing) == (0, 2)


def test_b05_the_requested_field_is_read(tmp_path: Path, run: Any, write_jsonl: WriteJsonl) -> None:
    run(write_jsonl(FIELDS[:1]), json_keys=["code"])
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "x_code_document.bin",
        "x_code_document.idx",
    ]
    assert _texts(tmp_path / "out" / "x_code_document") == ["c0"]


@pytest.mark.parametrize("skip", [False, True])
def test_b05_a_field_that_no_record_has(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, skip: bool
) -> None:
    with pytest.raises(DataError, match="field 'body'"):
        run(write_jsonl(FIELDS), json_keys=["text", "body"], skip_missing_keys=skip)
    assert list((tmp_path / "out").iterdir()) == []


class _Mortal(ByteTokenizer):
    """Kills its own process at a marker word."""

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        if any("MARKER" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tokenize_batch(texts)


def test_b07_a_worker_that_dies_is_noticed(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": f"record {n}{' MARKER' if n == 1200 else ''}"} for n in range(2000)]
    path = write_jsonl(records)
    with monkeypatch.context() as switch:
        switch.setattr(module, "named_tokenizer", lambda *_, **__: _Mortal())
        with pytest.raises(WorkerDiedError, match=r"worker \d of 4 .* SIGKILL \(signal 9\)"):
            run(path, workers=4, block_bytes=200)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.preprocess"]
    run(path, workers=4, block_bytes=200)
    run(path, out="clean/x", workers=1)
    again = {name: data for name, data in _bytes_of_files(tmp_path / "out").items()}
    assert again == _bytes(tmp_path / "out" / "clean")
    assert _texts(tmp_path / "out" / "x_text_document") == [record["text"] for record in records]


def _bytes_of_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("workers", [1, 4])
def test_b15_no_end_token_is_an_error_at_start(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, workers: int
) -> None:
    with pytest.raises(DataError, match="no begin-of-document token"):
        run(write_jsonl(FIVE), prepend_bos=True, workers=workers)
    assert not (tmp_path / "out").exists()


def test_the_item_type_follows_the_vocabulary(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl
) -> None:
    path = write_jsonl([{"text": "1 2"}])
    for size, name in ((65_499, "uint16"), (65_500, "int32")):
        run(path, tokenizer_type="NullTokenizer", vocab_size=size)
        assert IndexedDataset(tmp_path / "out" / "x_text_document").dtype.name == name


def test_a_word_outside_the_vocabulary_names_its_line(run: Any, write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{"text": "1"}, {"text": "77"}])
    with pytest.raises(DataError, match=r"in.jsonl: line 2: NullTokenizer: '77'"):
        run(path, tokenizer_type="NullTokenizer", tokenizer_model="10")


def test_sentences_become_sequences(tmp_path: Path, run: Any, write_jsonl: WriteJsonl) -> None:
    run(
        write_jsonl([{"text": 'One. "Two?" Three'}, {"text": "Four"}]),
        split_sentences=True,
        append_eod=True,
    )
    dataset = IndexedDataset(tmp_path / "out" / "x_text_sentence")
    assert _texts(tmp_path / "out" / "x_text_sentence") == ["One. ", '"Two?" ', "Three", "Four"]
    assert dataset.document_indices.tolist() == [0, 3, 4]
    assert [int(dataset[i][-1]) == 256 for i in range(4)] == [False, False, True, True]


def test_several_files_follow_each_other(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    paths = [write_jsonl([{"text": name}], name=f"{name}.jsonl") for name in "ab"]
    preprocess(PreprocessOptions(paths, str(tmp_path / "x"), "ByteTokenizer"))
    assert _texts(tmp_path / "x_text_document") == ["a", "b"]
    with pytest.raises(DataError, match=r"gone.jsonl: no such file"):
        preprocess(PreprocessOptions([*paths, "gone.jsonl"], str(tmp_path / "x"), "ByteTokenizer"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_named_pipe_is_read_once(
    tmp_path: Path, run: Any, write_jsonl: WriteJsonl, workers: int
) -> None:
    path = Path(write_jsonl({"text": f"record {n} " * (n % 7)} for n in range(300)))
    run(str(path), out="file/x")
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(path.read_bytes(),)).start()
    run(str(tmp_path / "pipe"), out="pipe/x", workers=workers, block_bytes=200, commit_seconds=0.0)
    assert _bytes(tmp_path / "out/pipe") == _bytes(tmp_path / "out/file")


def test_impossible_options_are_refused(run: Any, write_jsonl: WriteJsonl) -> None:
    path = write_jsonl(FIVE)
    with pytest.raises(DataError, match="--workers 0"):
        run(path, workers=0)
    with pytest.raises(DataError, match="--check-every 0"):
        run(path, check_every=0)
    with pytest.raises(DataError, match="named twice"):
        run(path, json_keys=["text", "text"])


def test_names_of_files_need_not_be_utf_8(tmp_path: Path, run: Any) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    Path(path).write_text('{"text": "a"}\n{"text": 5}\n{"text": "b"}\n')
    with pytest.raises(DataError, match="line 2: field 'text' is a number"):
        run(path, commit_seconds=0, block_bytes=1)
    report = run(path, commit_seconds=0, block_bytes=1, skip_bad_lines=True)
    assert report.bad_lines == 1 and _texts(tmp_path / "out/x_text_document") == ["a", "b"]


def test_a_line_longer_than_blocks_counts_once(run: Any, write_jsonl: WriteJsonl) -> None:
    """Also where blocks of the range are empty, since no line begins in them."""
    path = write_jsonl([{"text": "a" * 500}, {"text": "b"}, {"text": 5}])
    for size in (1, 7, 100, 512, 10_000):
        with pytest.raises(DataError, match="line 3: field 'text' is a number"):
            run(path, block_bytes=size)
