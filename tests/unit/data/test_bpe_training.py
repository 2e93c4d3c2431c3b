"""Training a byte-level BPE: same input, same file; any text survives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_lite.data.bpe_training import train_byte_level_bpe
from megatron_lite.data.errors import DataError
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.data.training_text import read_texts, thinned_out

WriteJsonl = Callable[..., str]
TEXTS = [f"the {n} quick brown foxes jump over {n * n} lazy dogs\n" for n in range(200)]


def test_the_tokenizer_is_exact_and_reproducible(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    source = write_jsonl({"body": text} for text in TEXTS)
    files = [tmp_path / name / "tokenizer.json" for name in ("one", "two")]
    for file in files:
        used = train_byte_level_bpe([source], file, vocab_size=400, json_key="body")
        assert used == len(TEXTS)
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = build_tokenizer("HFTokenizer", model=str(files[0]))
    assert tokenizer.vocab_size == 400
    assert (tokenizer.bos, tokenizer.eod) == (0, 0)
    text = "  def f(x):\n\t# é \U0001f642 \u2581\r\n \0<|endoftext|>"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert 0 not in tokenizer.tokenize(text)
    assert len(tokenizer.tokenize(" quick brown foxes")) == 3


def test_what_cannot_be_trained_is_told(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    target = tmp_path / "t.json"
    small = write_jsonl([{"text": "abc"}], name="s.jsonl")
    empty = write_jsonl([{"text": ""}], name="e.jsonl")
    for path, size, message in (
        (small, 300, "vocabulary of 300 can't be trained on 1 texts: they give 259 ids"),
        (small, 256, "needs at least 257"),
        (empty, 300, "no text in field 'text'"),
    ):
        with pytest.raises(DataError, match=message):
            train_byte_level_bpe([path], target, vocab_size=size)
    assert not target.exists()


def test_texts_come_from_any_input_and_bad_ones_are_named(
    tmp_path: Path, write_jsonl: WriteJsonl
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more/a.txt").write_text("from a text")
    good = write_jsonl([{"text": "one"}, b"", b'{"text": "x\\ud800"}'], name="g.jsonl")
    found = list(read_texts([good, str(tmp_path / "more")], "text"))
    assert found == ["one", "x\ufffd", "from a text"]
    bad = write_jsonl([{"text": "a"}, b"", {"body": "b"}], name="b.jsonl")
    with pytest.raises(DataError, match=r"b.jsonl: line 3: field 'text' is missing or null"):
        list(read_texts([bad], "text"))


def test_thinning_is_even() -> None:
    texts = [f"{number:03d}" for number in range(100)]
    assert thinned_out(texts, 300) == texts
    assert thinned_out(texts, 150) == texts[::2]
    few = [int(text) for text in thinned_out(texts, 25)]
    assert len(few) == 8 and {b - a for a, b in pairwise(few)} == {8, 16}
    assert thinned_out(texts, 1) == ["000"]
    assert thinned_out([], 10) == []
