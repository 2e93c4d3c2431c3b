"""An iterator that a thread keeps ahead of its reader, by a fixed number of items at most.

Knows nothing of what it hands on. Called by the loader.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _End:
    """Stands behind the last item; `error` is what ended the items, None at their end."""

    error: BaseException | None


class ReadAhead(Generic[Item]):
    """The items of `items` in their order; up to `depth` of them wait ready.

    An error of the items is raised where the item would have come. `close` lets go of them; it is
    called when nobody refers to this object any more.
    """

    def __init__(self, items: Iterator[Item], *, depth: int) -> None:
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = threading.Event()
        # The thread must not refer to this object, or it would never be let go.
        arguments = (items, self._ready, self._room, self._closed)
        threading.Thread(target=_pull, args=arguments, name="read-ahead", daemon=True).start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)  # the next call finds the same
            raise item.error or StopIteration
        self._room.release()
        result: Item = item
        return result

    def close(self) -> None:
        """Let the thread end, after the item that it is reading."""
        self._closed.set()
        self._room.release()

    __del__ = close


def _pull(
    items: Iterator[Any],
    ready: SimpleQueue[Any],
    room: threading.Semaphore,
    closed: threading.Event,
) -> None:
    try:
        while True:
            room.acquire()
            if closed.is_set():
                return
            ready.put(next(items))
    except StopIteration:
        ready.put(_End(None))
    except BaseException as error:
        ready.put(_End(error))
