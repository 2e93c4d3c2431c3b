"""Text ↔ token ids: `build_tokenizer`, and the two kinds that need no files.

The kinds that read files are in tokenizer_files.py and are imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_lite.config.tokenizer_files import FILE_KEYS, TOKENIZER_FILES
from megatron_lite.data.errors import DataError
from megatron_lite.data.tokenizer_base import TokenBatch, Tokenizer

TOKENIZER_TYPES = tuple(TOKENIZER_FILES)
_READ_BY = TOKENIZER_FILES | {"NullTokenizer": ("tokenizer_model",)}
"""The last one's is its vocabulary's size, as a number."""


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, and 256 as end of document; any text survives a round trip."""

    vocab_size = 257
    eod = 256

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes; UnicodeEncodeError for a lone surrogate."""
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return the UTF-8 bytes of all texts without a Python object for each."""
        parts = [text.encode("utf-8") for text in texts]
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return TokenBatch(np.frombuffer(b"".join(parts), dtype=np.uint8), lengths)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text, without ends of document; a cut character shows as U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Whitespace-separated integers; of vocab_size ids the highest is the end of document."""

    refuses_texts = True

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise DataError(f"NullTokenizer: vocabulary size {vocab_size}; must be at least 2")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        """Return the integers; DataError for a word that is none or lies outside the vocabulary."""
        tokens = []
        for word in text.split():
            if not (word.isascii() and word.isdecimal() and int(word) < self.vocab_size):
                raise DataError(
                    f"NullTokenizer: {word!r} is not an integer from 0 to {self.vocab_size - 1}"
                )
            tokens.append(int(word))
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the integers, separated by blanks."""
        return " ".join(str(int(token)) for token in tokens)


class TokenizerFlags(Protocol):
    """How a config's data section, and the flags of the data tools, name a tokenizer."""

    @property
    def tokenizer_type(self) -> str: ...
    @property
    def tokenizer_model(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...


def named_tokenizer(flags: TokenizerFlags, *, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer that a config or command line names; DataError as build_tokenizer, and
    for a file that this type would not read."""
    for name in FILE_KEYS:
        if getattr(flags, name) is not None and name not in _READ_BY.get(flags.tokenizer_type, ()):
            raise DataError(f"{flags.tokenizer_type}: reads no {name}; leave it out")
    return build_tokenizer(
        flags.tokenizer_type,
        model=flags.tokenizer_model,
        vocab_file=flags.vocab_file,
        merge_file=flags.merge_file,
        vocab_size=vocab_size,
    )


def build_tokenizer(
    kind: str,
    *,
    model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Build a tokenizer from the values of tokenizer_type, tokenizer_model, vocab_file, merge_file.

    model is the .model file (SentencePieceTokenizer), tokenizer.json or its folder (HFTokenizer).
    NullTokenizer takes its number of ids from vocab_size, else from model written as a number.
    DataError for an unknown kind and for a missing or unreadable file.
    """
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        if vocab_size is None and (model is None or not model.isdecimal()):
            raise DataError(
                f"NullTokenizer: needs a vocabulary size, as a number in tokenizer_model or as "
                f"vocab_size; tokenizer_model is {model!r}"
            )
        return NullTokenizer(int(model or 0) if vocab_size is None else vocab_size)
    from megatron_lite.data import tokenizer_files as files  # slow imports, only when needed

    if kind == "SentencePieceTokenizer":
        return files.SentencePieceTokenizer(_given(kind, "tokenizer_model", model))
    if kind == "HFTokenizer":
        return files.HFTokenizer(_given(kind, "tokenizer_model", model))
    if kind == "GPT2BPETokenizer":
        return files.GPT2BPETokenizer(
            _given(kind, "vocab_file", vocab_file), _given(kind, "merge_file", merge_file)
        )
    raise DataError(f"unknown tokenizer type {kind!r}; choose from {', '.join(TOKENIZER_TYPES)}")


def _given(kind: str, name: str, value: str | None) -> str:
    if not value:
        raise DataError(f"{kind}: needs {name}")
    return value
