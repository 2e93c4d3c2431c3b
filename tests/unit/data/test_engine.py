"""gigatoken is used where it gives the tokenizer's own tokens, and nowhere else."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from megatron_lite.data import engine as module
from megatron_lite.data.bpe_training import train_byte_level_bpe
from megatron_lite.data.engine import GigatokenEngine, NativeEngine, choose_engine, odd_texts
from megatron_lite.data.errors import DataError
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.preprocess_options import PreprocessOptions
from megatron_lite.data.sentencepiece_training import train_sentencepiece
from megatron_lite.data.tokenizer import ByteTokenizer, build_tokenizer
from megatron_lite.data.tokenizer_base import TokenBatch, Tokenizer

WriteJsonl = Callable[..., str]
TEXTS = [f"the {n} quick brown foxes don't <s> jump é {n * n}\r\n" for n in range(100)]


@pytest.fixture
def bpe(tmp_path: Path, write_jsonl: WriteJsonl) -> Tokenizer:
    """A byte-level BPE with two special tokens and one added token that is an ordinary word."""
    file = tmp_path / "tokenizer.json"
    train_byte_level_bpe([write_jsonl({"text": t} for t in TEXTS)], file, vocab_size=350)
    inner = tokenizers.Tokenizer.from_file(str(file))
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    inner.add_tokens([AddedToken("foxes", special=False)])
    inner.save(str(file))
    return build_tokenizer("HFTokenizer", model=str(file))


def _same(got: TokenBatch, want: TokenBatch) -> bool:
    return np.array_equal(got.ids, want.ids) and np.array_equal(got.lengths, want.lengths)


def test_auto_takes_gigatoken_for_byte_level_bpe(bpe: Tokenizer) -> None:
    engine, remark = choose_engine("auto", bpe)
    assert isinstance(engine, GigatokenEngine) and engine.checked
    assert remark.startswith("gigatoken 0.10.0")
    texts = [*TEXTS, *odd_texts(bpe), "<|endoftext|><s>"]
    assert _same(engine.encode(texts), bpe.tokenize_batch(texts))
    special = {bpe.bos, bpe.eod}
    assert not special & set(engine.encode(["<|endoftext|><s>"]).ids.tolist())


def test_a_new_instance_changes_nothing(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", -(1 << 40))
    engine = GigatokenEngine(str(bpe.byte_level_bpe()))
    loads = []
    real = engine._load
    monkeypatch.setattr(engine, "_load", lambda text: loads.append(text) or real(text))
    for text in TEXTS[:10]:
        assert _same(engine.encode([text]), bpe.tokenize_batch([text]))
    assert len(loads) == 10


def _growth(description: str, remembered: int) -> int:
    """Bytes that a new process gains over texts in which no word comes twice."""
    module._REMEMBERED = remembered
    numbers = np.random.default_rng(1)
    engine = GigatokenEngine(description)
    before = most = module._resident()
    for _ in range(30):
        words = numbers.integers(ord("a"), ord("z"), size=(1 << 17, 9), dtype=np.uint8)
        words[:, -1] = ord(" ")
        engine.encode([words.tobytes().decode()])
        most = max(most, module._resident())
    return most - before


def test_memory_stays_bounded_where_no_word_comes_twice(bpe: Tokenizer) -> None:
    description, spawn = str(bpe.byte_level_bpe()), multiprocessing.get_context("spawn")
    grown = []
    for remembered in (40 << 20, 1 << 40):  # what one process has freed, the next use would hide
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            grown.append(pool.submit(_growth, description, remembered).result())
    bounded, unbounded = grown
    assert bounded < 0.5 * unbounded


def test_gpt2_files_are_byte_level_bpe(tmp_path: Path, bpe: Tokenizer) -> None:
    model = json.loads(str(bpe.byte_level_bpe()))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    gpt2 = build_tokenizer("GPT2BPETokenizer", **files)
    engine, _ = choose_engine("gigatoken", gpt2)
    assert _same(engine.encode(TEXTS), gpt2.tokenize_batch(TEXTS))


def test_other_kinds_stay_with_the_tokenizer(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    model = tmp_path / "t.model"
    source = write_jsonl({"text": t} for t in TEXTS)
    train_sentencepiece([source], model, vocab_size=330, model_type="bpe")
    words = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    for tokenizer in (
        ByteTokenizer(),
        build_tokenizer("SentencePieceTokenizer", model=str(model)),
        build_tokenizer("HFTokenizer", model=str(tmp_path / "words.json")),
    ):
        engine, remark = choose_engine("auto", tokenizer)
        assert isinstance(engine, NativeEngine)
        assert remark == "native (gigatoken is used for byte-level BPE only)"
        with pytest.raises(DataError, match="for byte-level BPE only; use auto or native"):
            choose_engine("gigatoken", tokenizer)


class _Wrong(GigatokenEngine):
    """Loses a token of every text with an accent."""

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        right = super().encode(texts)
        parts = np.split(right.ids, np.cumsum(right.lengths)[:-1])
        return TokenBatch.from_lists(
            [part[: -1 if "\u0301" in t else None] for part, t in zip(parts, texts, strict=True)]
        )


def test_one_odd_text_is_enough_for_a_refusal(
    bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GigatokenEngine", _Wrong)
    engine, remark = choose_engine("auto", bpe)
    assert not engine.checked
    assert "gives other tokens than the tokenizer for '\u0301'" in remark
    with pytest.raises(DataError, match="gives other tokens than the tokenizer"):
        choose_engine("gigatoken", bpe)


class _Panics(GigatokenEngine):
    """Fails as Rust code does."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self._backend = self

    def encode_batch(self, *_: object, **__: object) -> None:
        raise BaseException("index out of bounds")


def test_an_engine_that_fails_is_left(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GigatokenEngine", _Panics)
    engine, remark = choose_engine("auto", bpe)
    assert not engine.checked
    assert remark == "native (gigatoken 0.10.0 failed: index out of bounds)"


def test_without_gigatoken_the_tokenizer_is_used(
    bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    engine, remark = choose_engine("auto", bpe)
    assert not engine.checked and "gigatoken is not installed" in remark
    with pytest.raises(DataError, match=r"not installed: pip install 'megatron_lite\[gigatoken\]'"):
        choose_engine("gigatoken", bpe)
    assert choose_engine("native", bpe)[1] == "native (asked for)"


def test_both_engines_write_the_same_bytes(
    tmp_path: Path, bpe: Tokenizer, write_jsonl: WriteJsonl
) -> None:
    texts = [*TEXTS, *odd_texts(bpe), "", " "]
    source = write_jsonl({"text": text} for text in texts)
    outputs = []
    for engine, workers in (("native", 1), ("auto", 1), ("gigatoken", 2)):
        options = PreprocessOptions(
            [source],
            str(tmp_path / engine),
            "HFTokenizer",
            tokenizer_model=str(tmp_path / "tokenizer.json"),
            tokenizer_engine=engine,
            check_every=7,
            append_eod=True,
            workers=workers,
            block_bytes=1000,
        )
        report = preprocess(options)
        assert report.engine.startswith("native" if engine == "native" else "gigatoken")
        assert report.disagreements == []
        prefix = options.prefixes()["text"]
        outputs.append([Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")])
    assert outputs[0] == outputs[1] == outputs[2]
