"""Tokenizer: what every kind of tokenizer offers.

One rule for all kinds and all workers: text that spells a special token is plain text; special
tokens come only from `encode`'s arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_lite.data.errors import DataError


class Tokenizer(ABC):
    """vocab_size is the highest id + 1, added tokens included; a special token may be None."""

    vocab_size: int
    bos: int | None = None
    """Begin-of-document id; may equal eod."""
    eod: int | None = None
    """End-of-document id."""
    pad: int | None = None

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of the text alone, without any special token."""

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
