"""Tokenizer: what every kind of tokenizer offers.

One rule for all kinds and all workers: text that spells a special token is plain text; special
tokens come only from `encode`'s arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lite.data.errors import DataError

STATING_FILES = ("special_tokens_map.json", "tokenizer_config.json")
"""Files beside a tokenizer.json that state its special tokens; the latter wins."""


class TokenBatch(NamedTuple):
    """Ids of many texts, end to end."""

    ids: npt.NDArray[np.integer]
    """[tokens], of any integer type."""
    lengths: npt.NDArray[np.int64]
    """[texts]: how many of the ids belong to each."""

    @staticmethod
    def from_lists(lists: Sequence[Sequence[int]]) -> TokenBatch:
        """Join the ids of each text."""
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        ids = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(lengths.sum()))
        return TokenBatch(ids, lengths)


class Tokenizer(ABC):
    """vocab_size is the highest id + 1, added tokens included; a special token may be None."""

    vocab_size: int
    bos: int | None = None
    """Begin-of-document id; may equal eod."""
    eod: int | None = None
    """End-of-document id."""
    pad: int | None = None
    refuses_texts = False
    """True for a kind whose `tokenize` may raise DataError for a text."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of the text alone, without any special token."""

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return what `tokenize` gives for each text; kinds that are faster in bulk override it."""
        return TokenBatch.from_lists([self.tokenize(text) for text in texts])

    def byte_level_bpe(self) -> str | None:
        """Return a tokenizer.json of the same ids for plain text, None unless byte-level BPE."""
        return None

    def special_texts(self) -> list[str]:
        """Return how the special tokens are spelt, where the kind knows."""
        return []

    @abstractmethod
    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of ids; how special tokens show depends on the kind."""

    def encode(self, text: str, *, add_bos: bool = False, add_eod: bool = False) -> list[int]:
        """Return the ids of the text with exactly the requested special tokens, each once.

        DataError when a requested one doesn't exist.
        """
        self.require(bos=add_bos, eod=add_eod)
        tokens = self.tokenize(text)
        if add_bos and self.bos is not None:
            tokens.insert(0, self.bos)
        if add_eod and self.eod is not None:
            tokens.append(self.eod)
        return tokens

    def require(self, *, bos: bool = False, eod: bool = False) -> None:
        """Raise DataError when a needed special token doesn't exist."""
        for needed, token, name in ((bos, self.bos, "begin"), (eod, self.eod, "end")):
            if needed and token is None:
                raise DataError(
                    f"{type(self).__name__} has no {name}-of-document token; don't request it or "
                    f"use a tokenizer that defines one"
                )
