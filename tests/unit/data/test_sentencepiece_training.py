"""Training a tokenizer: same input, same model; any text survives."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from megatron_lite.data.errors import DataError
from megatron_lite.data.sentencepiece_training import train_sentencepiece
from megatron_lite.data.tokenizer import build_tokenizer


@pytest.fixture
def corpus(tmp_path: Path, write_jsonl: object) -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [(library / name).read_text(encoding="utf-8") for name in ("shlex.py", "bisect.py")]
    return write_jsonl({"text": text} for text in texts)  # type: ignore[operator]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_model_is_exact_and_reproducible(tmp_path: Path, corpus: str, model_type: str) -> None:
    for name in ("one", "two"):
        train_sentencepiece(
            [corpus], tmp_path / name / "t.model", vocab_size=600, model_type=model_type
        )
    assert (tmp_path / "one/t.model").read_bytes() == (tmp_path / "two/t.model").read_bytes()
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=str(tmp_path / "one/t.model"))
    assert tokenizer.vocab_size == 600
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, None)
    text = "  def f(x):\n\n        return  x\t+ 1 # é \U0001f642 \u2581\r\n "
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert len(tokenizer.tokenize("        return")) < 6  # indentation is a piece


def test_what_cannot_be_trained_is_told(tmp_path: Path, write_jsonl: object) -> None:
    small = write_jsonl([{"text": "abc"}], name="s.jsonl")  # type: ignore[operator]
    empty = write_jsonl([{"text": ""}], name="e.jsonl")  # type: ignore[operator]
    bad = write_jsonl([{"text": "a"}, {"body": "b"}], name="b.jsonl")  # type: ignore[operator]
    target = tmp_path / "t.model"
    with pytest.raises(DataError, match="vocabulary of 5000 can't be trained on 1 lines: "):
        train_sentencepiece([small], target, vocab_size=5000)
    with pytest.raises(DataError, match="no text in field 'text'"):
        train_sentencepiece([empty], target, vocab_size=300)
    with pytest.raises(DataError, match=r"b.jsonl: line 2: field 'text' is missing"):
        train_sentencepiece([bad], target, vocab_size=300)
    for wrong, told in (
        ({"vocab_size": 2}, "the library demands .*eos"),
        ({"vocab_size": 300, "threads": 0}, "--threads 0"),
        ({"vocab_size": 300, "max_characters": 0}, "--max-characters 0"),
    ):
        with pytest.raises(DataError, match=told):
            train_sentencepiece([small], target, **wrong)
    with pytest.raises(DataError, match="is a folder; name the file to write"):
        train_sentencepiece([small], tmp_path, vocab_size=300)
    assert not target.exists()
