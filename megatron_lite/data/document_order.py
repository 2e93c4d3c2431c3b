"""The order of the documents in one epoch, without a list of it: only the tokens of its groups.

Nothing here grows with an epoch's samples, and nothing is stored: 10 million documents take one
pass over their lengths and 600 KB. Called by token_stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lite.data.permutation import key_words, mix

GROUP = 256
"""Documents of a group, at most. Part of the order: another number is another order."""


class Piece(NamedTuple):
    """A run of tokens inside one document."""

    document: int
    offset: int
    length: int


class DocumentOrder:
    """Where the tokens of an epoch lie; its documents come group by group.

    Shuffled: the corpus is cut into at most 256 stretches of equal size, and a group holds one
    document of each, so that a window shows documents from all over the corpus. Each stretch is
    turned by a keyed distance, which says which of its documents meets which of the others in a
    group; the groups are shuffled, and so are the documents of each. A corpus of up to 256
    documents is one group. Without a key a group is 256 neighbours and everything stays in place.

    lengths: integers [documents], tokens each; kept as they are, so they may be a mapped file.
    """

    def __init__(self, lengths: npt.NDArray[np.integer], *key: int | str) -> None:
        self._lengths = lengths
        self._groups = max(1, -(-len(lengths) // GROUP))
        stretches = -(-len(lengths) // self._groups)
        self._key: int | None = None
        self._firsts: npt.NDArray[np.int64] = np.arange(stretches) * self._groups
        if not key:
            starts = np.arange(0, len(lengths), GROUP)
            sums = np.add.reduceat(lengths, starts, dtype=np.int64)
        else:
            turning, places, self._key = key_words(3, *key)
            turns = mix(np.arange(stretches, dtype=np.uint64), turning) % self._groups
            self._turns: npt.NDArray[np.int64] = turns.astype(np.int64)
            self._places = _shuffled(np.arange(self._groups), places)
            sums = self._sum_groups()[self._places]
        self._ends: npt.NDArray[np.int64] = np.cumsum(sums)

    def _sum_groups(self) -> npt.NDArray[np.int64]:
        """Add up the tokens of each group before the shuffle: each stretch in two runs."""
        sums = np.zeros(self._groups, dtype=np.int64)
        for first, turn in zip(self._firsts.tolist(), self._turns.tolist(), strict=True):
            stretch = self._lengths[first : first + self._groups]  # the last one may be short
            head = stretch[turn:]
            sums[: len(head)] += head
            tail = stretch[:turn]
            sums[self._groups - turn : self._groups - turn + len(tail)] += tail
        return sums

    def _members(self, group: int) -> npt.NDArray[np.int64]:
        """Return the documents of a group in their order."""
        if self._key is None:
            return np.arange(group * GROUP, min((group + 1) * GROUP, len(self._lengths)))
        documents = self._firsts + (self._places[group] + self._turns) % self._groups
        (key,) = key_words(1, self._key, group)
        return _shuffled(documents[documents < len(self._lengths)], key)

    def pieces(self, position: int) -> Iterator[Piece]:
        """Yield the rest of the document at a token position of the epoch, then those behind it.

        A document without tokens leaves no piece.
        """
        group = int(np.searchsorted(self._ends, position, side="right"))
        inside = position - (int(self._ends[group - 1]) if group else 0)
        while group < self._groups:
            documents = self._members(group)
            ends = np.cumsum(self._lengths[documents], dtype=np.int64)
            slot = int(np.searchsorted(ends, inside, side="right"))
            for document, end in zip(documents[slot:].tolist(), ends[slot:].tolist(), strict=True):
                length = int(self._lengths[document])
                if end > inside:
                    yield Piece(document, length - (end - inside), end - inside)
                inside = end
            group, inside = group + 1, 0


def _shuffled(numbers: npt.NDArray[np.int64], key: int) -> npt.NDArray[np.int64]:
    """Return different numbers in an order that belongs to a key."""
    # mix is one to one, so that no two are equal and every sort agrees.
    return numbers[np.argsort(mix(numbers.astype(np.uint64), key))]
