"""The corpus made of Python's own library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.data.corpus import make_corpus, split_source
from megatron_lite.data.errors import DataError


def _library(root: Path) -> Path:
    files = {
        "b.py": '"""B."""\n',
        "a/x.py": "".join(f"def f{n}():\n    return {n}\n\n\n" for n in range(400)),
        "pydoc_data/topics.py": "topics = {'z': 'last topic', 'm': 'first\\n\\ntopic'}\n",
        "test/t.py": "skipped = 1\n",
        "site-packages/p.py": "skipped = 1\n",
        "_sysconfigdata_x.py": "skipped = 1\n",
        "empty.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    return root


def test_content_and_order(tmp_path: Path) -> None:
    root = _library(tmp_path / "lib")
    report = make_corpus(tmp_path / "new" / "c.jsonl", root=root)
    lines = (tmp_path / "new" / "c.jsonl").read_bytes().split(b"\n")[:-1]
    records = [json.loads(line) for line in lines]
    assert len(records) == report.documents
    assert (report.files, report.skipped) == (4, 1)
    sources = [record["source"] for record in records]
    assert sources == sorted(sources)
    assert set(sources) == {"a/x.py", "b.py", "pydoc_data/topics.py"}
    assert [r["text"] for r in records[-2:]] == ["first\n\ntopic", "last topic"]
    whole = "".join(r["text"] for r in records if r["source"] == "a/x.py")
    assert whole == (root / "a" / "x.py").read_text()
    assert all(r["text"].startswith("def ") for r in records if r["source"] == "a/x.py")
    assert sources.count("a/x.py") > 1


def test_twice_the_same(tmp_path: Path) -> None:
    root = _library(tmp_path / "lib")
    for name in ("one", "two"):
        make_corpus(tmp_path / name, root=root)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_long_classes_are_cut_at_methods() -> None:
    method = "    def f(self):\n" + "        value = 1\n" * 40 + "\n"
    pieces = list(split_source("class C:\n" + method * 60))
    assert len(pieces) > 2
    assert all(piece.startswith("    def f") for piece in pieces[1:])
    assert all(len(piece) < 14_000 for piece in pieces)


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no Python sources"):
        make_corpus(tmp_path / "c.jsonl", root=tmp_path)
    assert list(tmp_path.iterdir()) == []
