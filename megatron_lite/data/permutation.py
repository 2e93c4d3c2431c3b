"""Orders that any process can recompute from a key: a bijection of 0 … n - 1 without memory.

Not cryptography. Called by token_stream for windows and by document_order for documents. Integer
arithmetic and BLAKE2 only, so an order depends on no library version.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Word = TypeVar("Word", int, npt.NDArray[Any])

_MASK64 = (1 << 64) - 1
_ROUNDS = 8


def mix(word: Word, key: int) -> Word:
    """Scramble 64-bit words, one to one (splitmix64's finaliser constants, Steele et al. 2014)."""
    word = ((word ^ key) * 0x9E3779B97F4A7C15) & _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


def key_words(count: int, *key: int | str) -> list[int]:
    """Return up to eight 64-bit numbers that belong to a key, a tuple of integers and strings."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=count * 8).digest()
    return [int(word) for word in np.frombuffer(digest, dtype="<u8")]


class KeyedPermutation:
    """The permutation of 0 … size - 1 that belongs to a key, a tuple of integers and strings.

    An unbalanced Feistel network over the smallest power of two that holds `size`; values that fall
    outside are sent through again until they fall inside (Black and Rogaway 2002, cycle walking),
    fewer than two passes on average. ValueError for a size below 1.
    """

    def __init__(self, size: int, *key: int | str) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, got size {size}")
        bits = max(2, (size - 1).bit_length())
        self.size = size
        self._low_bits = bits // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self._round_keys = key_words(_ROUNDS, *key)

    def _pass(self, word: int) -> int:
        """Map words of the enclosing power of two onto themselves, one to one."""
        high, low = word >> self._low_bits, word & self._low_mask
        for number, key in enumerate(self._round_keys):
            if number % 2 == 0:
                high = high ^ (mix(low, key) & self._high_mask)
            else:
                low = low ^ (mix(high, key) & self._low_mask)
        return (high << self._low_bits) | low

    def __call__(self, index: int) -> int:
        """Return the element at position `index`; IndexError outside 0 … size - 1."""
        if not 0 <= index < self.size:
            raise IndexError(f"position {index} is outside a permutation of {self.size}")
        value = self._pass(index)
        while value >= self.size:
            value = self._pass(value)
        return value
