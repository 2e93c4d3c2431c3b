"""Runs that are killed anywhere and go on, and an engine that turns out to be wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.data import preprocess as module
from megatron_lite.data import work_folder
from megatron_lite.data.encoding import FieldResult
from megatron_lite.data.engine import EngineError
from megatron_lite.data.errors import DataError
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.preprocess_options import PreprocessOptions
from megatron_lite.data.preprocess_report import PreprocessReport
from megatron_lite.data.tokenizer import ByteTokenizer
from megatron_lite.data.tokenizer_base import TokenBatch
from megatron_lite.data.work_folder import WorkFolder

WriteJsonl = Callable[..., str]


@pytest.fixture
def options(tmp_path: Path, write_jsonl: WriteJsonl) -> Callable[..., PreprocessOptions]:
    """Return a function that makes options for about 20 blocks of two files, one with bad lines."""
    records: list[Any] = [{"text": f"record {n} " * (n % 7), "code": "c" * n} for n in range(100)]
    first = write_jsonl(records, name="a.jsonl")
    second = write_jsonl([*records[:40], b"bad", *records[40:], b"[]"], name="b.jsonl")

    def make(out: str, **changes: Any) -> PreprocessOptions:
        settings = {"json_keys": ("text", "code"), "skip_bad_lines": True, "append_eod": True}
        settings |= {"block_bytes": 1500, "commit_seconds": 0.0}
        prefix = str(tmp_path / "out" / out)
        return PreprocessOptions([first, second], prefix, "ByteTokenizer", **(settings | changes))

    return make


def _outputs(folder: Path, out: str) -> dict[str, bytes]:
    return {p.name[len(out) :]: p.read_bytes() for p in folder.glob(f"{out}_*")}


def _facts(report: PreprocessReport) -> dict[str, Any]:
    return vars(report) | {"seconds": 0}


def _killed(options: PreprocessOptions, count: int) -> bool:
    """Run in a process that ends, by kill -9, at the count-th append or change of a file's name."""

    def run() -> None:
        left = iter(range(count))

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **settings: Any) -> Any:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **settings)

            return call

        os.replace = counted(os.replace)
        os.unlink = counted(os.unlink)
        module.WorkFolder.append = counted(module.WorkFolder.append)  # type: ignore[method-assign]
        preprocess(options)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(timeout=60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_killed_anywhere_and_resumed_the_bytes_are_the_same(
    tmp_path: Path, options: Callable[..., PreprocessOptions]
) -> None:
    wanted = preprocess(options("whole"))
    outputs = _outputs(tmp_path / "out", "whole")
    assert len(outputs) == 4
    kills = 0
    for count in range(0, 200, 9):
        out = f"k{count}"
        if not _killed(options(out), count):
            break
        kills += 1
        indexes = list((tmp_path / "out").glob(f"{out}_*.idx"))
        assert all(outputs[p.name[len(out) :]] == p.read_bytes() for p in indexes)
        report = preprocess(options(out, workers=1 + count % 2))
        assert _outputs(tmp_path / "out", out) == outputs
        assert _facts(report) == _facts(wanted)
        assert not (tmp_path / "out" / f"{out}.preprocess").exists()
    else:
        pytest.fail("the run has more moments than were tried")
    assert kills > 5


def test_another_command_is_refused_and_can_begin_anew(
    tmp_path: Path, options: Callable[..., PreprocessOptions]
) -> None:
    assert _killed(options("x"), 20)
    for changes, named in (
        ({"append_eod": False}, "append eod was True, now False"),
        ({"json_keys": ("text",)}, "json keys was"),
        ({"skip_bad_lines": False}, "skip bad lines was True, now False"),
        ({"block_bytes": 900}, "block bytes was 1500, now 900"),
    ):
        with pytest.raises(DataError, match=f"holds the work of another command: {named}.*--rest"):
            preprocess(options("x", **changes))
    source = Path(options("x").input[0])
    source.write_bytes(source.read_bytes() + b'{"text": "new", "code": "new"}\n')
    with pytest.raises(DataError, match=r"input 1 was .*a.jsonl .*bytes, changed at .*, now "):
        preprocess(options("x"))
    report = preprocess(options("x", restart=True))
    assert report.records == 201
    preprocess(options("whole"))
    assert _outputs(tmp_path / "out", "x") == _outputs(tmp_path / "out", "whole")


def test_a_bad_line_after_long_work_can_be_skipped_without_doing_it_again(
    tmp_path: Path, options: Callable[..., PreprocessOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"b.jsonl: line 41: not a whole JSON object"):
        preprocess(options("x", skip_bad_lines=False))
    encoded = []
    real = module.BlockEncoder.__call__
    monkeypatch.setattr(
        module.BlockEncoder, "__call__", lambda self, b: encoded.append(b) or real(self, b)
    )
    report = preprocess(options("x"))
    assert {block.place.source for block in encoded} == {1}
    assert report.bad_lines == 2 and len(report.bad_examples) == 2
    assert report.bad_examples[1].endswith("b.jsonl: line 102: an array instead of a JSON object")
    preprocess(options("whole"))
    assert _outputs(tmp_path / "out", "x") == _outputs(tmp_path / "out", "whole")


def test_much_work_is_committed_before_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.arange(100, dtype=np.int32)
    part = FieldResult(numbers, numbers[:1] + 100, numbers[:1] + 1)
    committed = tmp_path / "work/committed.json"
    with WorkFolder(tmp_path / "work", {}, ["text"]) as work:
        work.append({"text": part}, lambda: {"at": 1})
        work.commit_if_due(1e9)
        work.wait()
        assert not committed.exists()
        monkeypatch.setattr(work_folder, "_MUCH", 500)
        work.commit_if_due(1e9)
        work.wait()
        assert not committed.exists()
        work.append({"text": part}, lambda: {"at": 2})
        work.commit_if_due(1e9)
        work.wait()
        content = json.loads(committed.read_text())
        assert content["sizes"] == {"0.tokens": 800, "0.lengths": 8, "0.sequences": 8}
        assert content["state"] == {"at": 2}
        work.append({"text": part}, lambda: {"at": 3})
        work.commit_if_due(1e9)
        work.wait()
        assert json.loads(committed.read_text()) == content


def test_two_runs_on_one_prefix_are_refused(options: Callable[..., PreprocessOptions]) -> None:
    context = multiprocessing.get_context("fork")
    outcome = context.SimpleQueue()

    def second() -> None:
        try:
            preprocess(options("x"))
        except DataError as error:
            outcome.put(str(error))

    def meanwhile(*_: Any) -> Any:
        process = context.Process(target=second)
        process.start()
        process.join(timeout=60)
        return TokenBatch.from_lists([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_check_documents", meanwhile)
        preprocess(options("x"))
    assert "another process is writing this prefix" in outcome.get()


class _Drifting:
    """An engine whose tokens are wrong from one document on, noticed or not."""

    name = "drifting 1"
    checked = True

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        batch = ByteTokenizer().tokenize_batch(texts)
        wrong = [ord("!") if "record 6" in text else 0 for text in texts]
        changed = batch.ids.astype("i4")
        changed[(batch.lengths.cumsum() - batch.lengths)[batch.lengths > 0]] += [
            w for w, n in zip(wrong, batch.lengths, strict=True) if n
        ]
        return TokenBatch(changed % 256, batch.lengths)


def test_a_wrong_engine_is_found_and_left_the_same_way_every_time(
    tmp_path: Path, options: Callable[..., PreprocessOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "choose_engine", lambda *_: (_Drifting(), "drifting"))
    reports = [preprocess(options(f"w{n}", workers=n, check_every=5)) for n in (1, 2, 4)]
    assert _killed(options("k", check_every=5), 30)
    reports.append(preprocess(options("k", check_every=5, workers=2)))
    outputs = [_outputs(tmp_path / "out", out) for out in ("w1", "w2", "w4", "k")]
    assert all(output == outputs[0] for output in outputs)
    for report in reports:
        (told,) = report.disagreements
        assert told == reports[0].disagreements[0]
        assert "a.jsonl: line 7" in told and told.endswith("gives other tokens than the tokenizer")
        assert any(told in line for line in report.lines({"text": "", "code": ""}))
    asked = options("asked", tokenizer_engine="gigatoken", check_every=5)
    with pytest.raises(DataError, match=r"a.jsonl: line 7: drifting 1 gives other tokens than"):
        preprocess(asked)
    preprocess(options("every", check_every=1))
    monkeypatch.undo()
    preprocess(options("native"))
    outputs = [_outputs(tmp_path / "out", out) for out in ("every", "native")]
    assert outputs[0] == outputs[1]


class _Failing:
    """An engine that fails at one document."""

    name = "failing 1"
    checked = True

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        if any("record 60 " in text for text in texts):
            raise EngineError("failing 1 failed: it can't")
        return ByteTokenizer().tokenize_batch(texts)


def test_a_failure_of_the_engine_is_made_good(
    tmp_path: Path, options: Callable[..., PreprocessOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "choose_engine", lambda *_: (_Failing(), "failing"))
    (told,) = preprocess(options("x")).disagreements
    assert told.endswith(": failing 1 failed: it can't") and "a.jsonl: line " in told
    with pytest.raises(DataError, match="failing 1 failed: it can't; use --tokenizer-engine auto"):
        preprocess(options("asked", tokenizer_engine="gigatoken"))
    monkeypatch.undo()
    preprocess(options("native"))
    assert _outputs(tmp_path / "out", "x") == _outputs(tmp_path / "out", "native")
