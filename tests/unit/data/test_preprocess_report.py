"""The report: counts, the first bad lines with their places, lengths."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from megatron_lite.data.blocks import Place
from megatron_lite.data.encoding import BlockResult, FieldResult
from megatron_lite.data.preprocess_report import PreprocessReport
from megatron_lite.data.progress import Progress


def _result(lengths: list[int], sequences: list[int], bad: list[tuple[int, str]]) -> BlockResult:
    part = FieldResult(
        np.zeros(sum(lengths), np.uint16), np.array(lengths, "i4"), np.array(sequences, "i4")
    )
    place = Place("in.jsonl", 0, 0, 10, "line")
    return BlockResult(place, 20, records=len(sequences), fields={"text": part}, bad=bad)


def test_lengths_and_bad_lines() -> None:
    report = PreprocessReport(dtype="uint16", input_bytes=10)
    report.add(_result([1, 2, 3, 4], [1, 1, 2], [(n, "fault") for n in range(1, 8)]), 0)
    report.add(_result([900], [1], [(n, "other") for n in range(1, 8)]), 20)
    part = report.fields["text"]
    assert (part.documents, part.tokens, part.longest) == (4, 910, 900)
    assert part.histogram[:4] == [1, 1, 1, 0] and part.histogram[9] == 1
    assert sum(part.histogram) == 4
    text = "\n".join(report.lines({"text": "out"}))
    assert "bad lines skipped: 14\n  in.jsonl: line 1: fault" in text
    assert "  in.jsonl: line 23: other\n  … and 4 more" in text
    assert "text: 227.5 tokens a document, the longest 900" in text
    assert "           1 to          1 tokens            1  ####" in text
    assert "           8 to         15 tokens            0\n" in text
    assert text.splitlines()[-1].startswith("         512 to       1023 tokens            1  #")


def test_a_copy_stands_still_and_json_keeps_all() -> None:
    report = PreprocessReport(engine="e", dtype="uint16")
    report.add(_result([5], [1], [(1, "fault")]), 0)
    copy = report.copy()
    kept = json.dumps(asdict(copy))
    report.add(_result([7], [1], [(2, "fault")]), 20)
    assert json.dumps(asdict(copy)) == kept
    assert PreprocessReport.from_dict(json.loads(kept)) == copy
    assert report.fields["text"].tokens == 12


def test_progress_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4_000_000, interval=10, begun=1_000_000) as progress:
        progress.update(1_500_000, documents=5, tokens=50)
        assert capsys.readouterr().err == ""
        progress.update(2_000_000, documents=5, tokens=50)
    line = capsys.readouterr().err
    assert line.startswith("processed 10 documents, 2.0 of 4.0 MB, ")
    assert line.count("\n") == 1 and line.endswith(" left\n")
