"""Special tokens, vocabulary sizes and round trips of all five kinds."""

from __future__ import annotations

import io
import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from megatron_lite.data.errors import DataError
from megatron_lite.data.preprocess_options import PreprocessOptions
from megatron_lite.data.tokenizer import ByteTokenizer, build_tokenizer, named_tokenizer
from megatron_lite.data.tokenizer_base import Tokenizer

WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}


def _save_fast(folder: Path, *, bos: str, eos: str, config: bool = True) -> str:
    """Save a word-level tokenizer whose template adds begin and end behind the user's back."""
    inner = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([AddedToken(name, special=True) for name in (bos, eos)])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        special_tokens=[(name, inner.token_to_id(name)) for name in {bos, eos}],
    )
    inner.enable_truncation(max_length=4)
    inner.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    if config:
        stated = {"bos_token": {"content": bos}, "eos_token": eos, "pad_token": None}
        (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return str(folder)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = io.BytesIO()
    text = [f"the {n} quick brown fox jumps over lazy dogs {n * 7}" for n in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture
def gpt2(tmp_path: Path) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary |= {"he": 256, "llo": 257, "ll": 258, "<|endoftext|>": 259}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nll o\n")
    return build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )


def _exactly(tokenizer: Tokenizer, text: str) -> None:
    """Check that every combination of begin and end adds just that, once."""
    plain = tokenizer.tokenize(text)
    assert tokenizer.bos is not None and tokenizer.eod is not None
    assert tokenizer.bos not in plain and tokenizer.eod not in plain
    for add_bos, add_eod in product((False, True), repeat=2):
        expected = [tokenizer.bos] * add_bos + plain + [tokenizer.eod] * add_eod
        assert tokenizer.encode(text, add_bos=add_bos, add_eod=add_eod) == expected


@pytest.mark.parametrize("config", [True, False])
def test_b15_shared_begin_and_end(tmp_path: Path, config: bool) -> None:
    folder = _save_fast(tmp_path / "t", bos="<|endoftext|>", eos="<|endoftext|>", config=config)
    tokenizer = build_tokenizer("HFTokenizer", model=folder)
    assert tokenizer.bos == tokenizer.eod == 4
    _exactly(tokenizer, "one two")


@pytest.mark.parametrize("config", [True, False])
def test_b15_different_begin_and_end(tmp_path: Path, config: bool) -> None:
    folder = _save_fast(tmp_path / "t", bos="<s>", eos="</s>", config=config)
    tokenizer = build_tokenizer("HFTokenizer", model=folder)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (4, 5, None)
    _exactly(tokenizer, "one two")


def test_b15_a_requested_token_that_is_missing_is_an_error() -> None:
    with pytest.raises(DataError, match="ByteTokenizer has no begin-of-document"):
        ByteTokenizer().encode("x", add_bos=True)


def test_b16_templates_truncation_and_padding_are_off(tmp_path: Path) -> None:
    folder = _save_fast(tmp_path / "t", bos="<s>", eos="</s>")
    tokenizer = build_tokenizer("HFTokenizer", model=folder + "/tokenizer.json")
    assert tokenizer.tokenize("one two three two one") == [1, 2, 3, 2, 1]


def test_b16_a_special_token_spelt_in_a_text_is_text(
    tmp_path: Path, sentencepiece_model: str, gpt2: Tokenizer
) -> None:
    folder = _save_fast(tmp_path / "t", bos="<s>", eos="</s>")
    fast = build_tokenizer("HFTokenizer", model=folder)
    pieces = build_tokenizer("SentencePieceTokenizer", model=sentencepiece_model)
    assert not {4, 5} & set(fast.tokenize("one</s> <s> two"))
    assert not {1, 2} & set(pieces.tokenize("one</s> <s> two"))
    assert pieces.detokenize(pieces.tokenize("one</s> <s> two")) == "one</s> <s> two"
    assert gpt2.eod not in gpt2.tokenize("a<|endoftext|>b")
    assert gpt2.detokenize(gpt2.tokenize("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_b16_sentencepiece_ids(sentencepiece_model: str) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=sentencepiece_model)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, None)
    _exactly(tokenizer, "the quick fox")


def test_b18_added_tokens_count(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens(["added"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HFTokenizer", model=str(tmp_path))
    assert tokenizer.vocab_size == 7
    assert max(tokenizer.encode("added", add_bos=True, add_eod=True)) == 6


def test_b18_holes_in_the_ids_count(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel(WORDS | {"far": 99}, unk_token="[UNK]"))
    inner.save(str(tmp_path / "tokenizer.json"))
    assert build_tokenizer("HFTokenizer", model=str(tmp_path)).vocab_size == 100


def test_gpt2_merges_and_ids(gpt2: Tokenizer) -> None:
    assert gpt2.tokenize("hello") == [256, 257]
    assert gpt2.bos == gpt2.eod == 259
    assert gpt2.vocab_size == 260


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_any_text_survives_a_round_trip(sentencepiece_model: str, text: str) -> None:
    for tokenizer in (
        ByteTokenizer(),
        build_tokenizer("SentencePieceTokenizer", model=sentencepiece_model),
    ):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize(
    "text", ["\u2581", "a\u2581\u2581 b\u2581", " \u2028\n\t\r\x00", "日本🙂é"]
)
def test_awkward_characters_survive(sentencepiece_model: str, gpt2: Tokenizer, text: str) -> None:
    pieces = build_tokenizer("SentencePieceTokenizer", model=sentencepiece_model)
    for tokenizer in (pieces, gpt2, ByteTokenizer()):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_bytes() -> None:
    tokenizer = build_tokenizer("ByteTokenizer")
    assert tokenizer.encode("é", add_eod=True) == [0xC3, 0xA9, 256]
    assert tokenizer.detokenize([0xC3, 0xA9, 256]) == "é"
    assert tokenizer.vocab_size == 257


def test_null() -> None:
    tokenizer = build_tokenizer("NullTokenizer", model="11")
    assert tokenizer.encode("3 0\n9", add_eod=True) == [3, 0, 9, 10]
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.detokenize([3, 10]) == "3 10"
    assert build_tokenizer("NullTokenizer", vocab_size=7).vocab_size == 7
    for text in ("11", "-1", "x", "1.0", "²"):
        with pytest.raises(DataError, match="not an integer from 0 to 10"):
            tokenizer.tokenize(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "Nope"}, "unknown tokenizer type 'Nope'"),
        ({"kind": "NullTokenizer"}, "needs a vocabulary size"),
        ({"kind": "NullTokenizer", "vocab_size": 1}, "at least 2"),
        ({"kind": "SentencePieceTokenizer"}, "needs tokenizer_model"),
        ({"kind": "HFTokenizer", "model": "/nowhere"}, "/nowhere: no such file"),
        ({"kind": "GPT2BPETokenizer", "vocab_file": "v"}, "needs merge_file"),
    ],
)
def test_what_is_missing_is_named(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(**arguments)  # type: ignore[arg-type]


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "x.model").write_text("rubbish")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
        build_tokenizer("HFTokenizer", model=str(tmp_path))
    with pytest.raises(DataError, match=r"x\.model: not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", model=str(tmp_path / "x.model"))
    with pytest.raises(DataError, match="not a BPE vocabulary"):
        build_tokenizer(
            "GPT2BPETokenizer",
            vocab_file=str(tmp_path / "x.model"),
            merge_file=str(tmp_path / "x.model"),
        )


def test_a_stated_token_must_exist(tmp_path: Path) -> None:
    folder = Path(_save_fast(tmp_path / "t", bos="<s>", eos="</s>"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<gone>"}))
    with pytest.raises(DataError, match="lacks the eos_token '<gone>'"):
        build_tokenizer("HFTokenizer", model=str(folder))


def test_byte_level_hf_round_trip(tmp_path: Path) -> None:
    alphabet = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(models.BPE(alphabet, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HFTokenizer", model=str(tmp_path))
    assert tokenizer.detokenize(tokenizer.tokenize(" a\n日本 ")) == " a\n日本 "
    assert tokenizer.bos is tokenizer.eod is None


def test_a_file_that_a_type_does_not_read_is_told() -> None:
    flags = SimpleNamespace(
        tokenizer_type="ByteTokenizer", tokenizer_model=None, vocab_file="v.json", merge_file=None
    )
    with pytest.raises(DataError, match="ByteTokenizer: reads no vocab_file; leave it out"):
        named_tokenizer(flags)
    options = PreprocessOptions(["x"], "y", "ByteTokenizer", vocab_size=5)
    with pytest.raises(DataError, match="--vocab-size 5: is for NullTokenizer"):
        options.check()
