"""Which program turns texts into ids: a tokenizer's own, or gigatoken where it gives the same.

gigatoken (an optional package) is far faster for byte-level BPE. It is never trusted: it must agree
with the tokenizer on a set of odd texts before it is used at all, and encoding compares documents
all along. Called by preprocess and encoding.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_lite.data.errors import DataError
from megatron_lite.data.tokenizer_base import TokenBatch, Tokenizer

ENGINES = ("auto", "gigatoken", "native")
_REMEMBERED = 256 << 20  # bytes; gigatoken keeps every word that it has met
_PAGE = resource.getpagesize()


class EngineError(Exception):
    """An engine that is not the tokenizer itself could not encode some texts."""


class Engine(Protocol):
    """Encodes many texts at a time."""

    name: str
    checked: bool
    """True where its answers must be compared with the tokenizer's."""

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Return the ids of the texts, without special tokens."""


class NativeEngine:
    """The tokenizer itself."""

    name = "native"
    checked = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = tokenizer.tokenize_batch


class GigatokenEngine:
    """gigatoken on the calling thread; a new instance now and then bounds its memory."""

    checked = True

    def __init__(self, description: str) -> None:
        """`description` is a tokenizer.json; ImportError where gigatoken is missing."""
        import gigatoken

        self.name = f"gigatoken {_version()}"
        self._load = gigatoken.gigatoken_rs.load_hf_json
        self._description = description
        self._backend: Any = self._load(description)
        self._limit = _resident() + _REMEMBERED

    def _renew(self) -> None:
        """Forget all words; most of the memory goes back to the system, and some never does."""
        del self._backend
        self._backend = self._load(self._description)
        self._limit = max(self._limit, _resident() + _REMEMBERED // 4)

    def encode(self, texts: Sequence[str]) -> TokenBatch:
        """Return the ids of the texts, without special tokens; EngineError where it fails."""
        try:
            if _resident() > self._limit:
                self._renew()
            layout = self._backend.encode_batch(list(texts), parallel=False).layout
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust code is not an Exception
            raise EngineError(f"{self.name} failed: {error}") from error
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return TokenBatch(ids, np.diff(offsets))


def _resident() -> int:
    """Return the memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _version() -> str:
    from importlib.metadata import version

    return version("gigatoken")


def choose_engine(asked: str, tokenizer: Tokenizer) -> tuple[Engine, str]:
    """Return the engine for --tokenizer-engine and a remark for the person who runs it.

    `auto` takes gigatoken where it is installed and agrees on all odd texts. DataError where it was
    asked for by name and can't be used.
    """
    if asked not in ENGINES:
        raise DataError(f"tokenizer engine {asked!r}: choose from {', '.join(ENGINES)}")
    if asked == "native":
        return NativeEngine(tokenizer), "native (asked for)"
    engine, why = _gigatoken(tokenizer)
    if engine is not None:
        return engine, f"{engine.name}, compared with the tokenizer itself all along"
    if asked == "gigatoken":
        raise DataError(f"--tokenizer-engine gigatoken: {why}; use auto or native")
    return NativeEngine(tokenizer), f"native ({why})"


def _gigatoken(tokenizer: Tokenizer) -> tuple[Engine | None, str]:
    """Return gigatoken's engine, or why it can't be used."""
    description = tokenizer.byte_level_bpe()
    if description is None:
        return None, "gigatoken is used for byte-level BPE only"
    try:
        engine = GigatokenEngine(description)
        different = first_difference(engine, tokenizer)
    except ImportError:
        return None, "gigatoken is not installed: pip install 'megatron_lite[gigatoken]'"
    except EngineError as error:
        return None, str(error)
    except Exception as error:  # it doesn't say what it raises for a file that it can't read
        return None, f"gigatoken can't read this tokenizer: {error}"
    if different is not None:
        shown = repr(different if len(different) <= 40 else different[:40] + "…")
        return None, f"gigatoken gives other tokens than the tokenizer for {shown}"
    return engine, ""


def first_difference(engine: Engine, tokenizer: Tokenizer) -> str | None:
    """Return the first odd text whose ids differ, None where all agree."""
    texts = odd_texts(tokenizer)
    want, got = tokenizer.tokenize_batch(texts), engine.encode(texts)
    if not np.array_equal(want.lengths, got.lengths):
        return texts[int(np.argmax(want.lengths != got.lengths))]
    if np.array_equal(want.ids, got.ids):
        return None
    place = int(np.argmax(want.ids != got.ids))
    return texts[int(np.searchsorted(np.cumsum(want.lengths), place, side="right"))]


def odd_texts(tokenizer: Tokenizer) -> list[str]:
    """Return texts that programs have been seen to treat differently, each in several settings."""
    odd = [
        *("", " ", "  ", "\n", "\r\n", "\t", "\n\n\n", "\r", "\0", "\x7f", "\u0085", "\u00a0"),
        *("\u2028", "\u2029", "\u200b", "\u200d", "\ufeff", "\ufffd", "\uffff", "\U0010ffff"),
        *("\u0301", "e\u0301\u0301", "\u0e33", "\u1100\u1161", "ﬁ", "ǅ", "İ", "ß", "ſ", "Σς"),
        *("日本語", "한국어", "ไทย", "नमस्ते", "עברית", "مرحبا", "👩‍👩‍👧", "🏳️‍🌈", "🇫🇷🇩🇪", "𝔘𝔫𝔦"),
        *("1", "12", "123", "1234567890", "3.14159", "1,000,000", "٣٤٥", "Ⅷ", "²", "½", "0x1F"),
        *("don't", "DON'T", "it’s", "I'll've", "'s", " 's", "a'b", "''''", "_x_", "__init__"),
        *(
            "a  b",
            "a   b",
            "a \n b",
            "a\r\nb\r\n",
            "  a",
            "a  ",
            "\n a",
            "a\n\n\tb",
            "if x:\n    y",
        ),
        *("aA", "ABCdef", "camelCase", "x=y+z;", "!!!", "-->", "((()))", "http://a.b/c?d=e&f#g"),
        *("<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<|im_start|>user", "[INST]", "[MASK]"),
        *(f"{special} x{special}" for special in tokenizer.special_texts()),
    ]
    runs = [character * 3000 for character in ("a", " ", "\n", "=", "0", "é", "\u0301", "👍", "\0")]
    settings = [
        f"{before}{text}{after}" for text in odd for before, after in (("x", ""), ("", "y"))
    ]
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x10000, 7))))  # most of the plane
    return [*odd, *settings, *runs, " ".join(odd) * 60, every]
