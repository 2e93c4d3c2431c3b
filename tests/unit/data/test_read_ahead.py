"""A thread that reads ahead: order, depth, errors, and an end without anybody's help."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from megatron_lite.data.read_ahead import ReadAhead


class Counter(Iterator[int]):
    """0, 1, 2, … `stop` - 1; tells when `mark` is asked for and when nobody needs it any more."""

    def __init__(self, *, stop: int = 1000, mark: int = 0) -> None:
        self.number, self.stop, self.mark = 0, stop, mark
        self.reached, self.gone = threading.Event(), threading.Event()

    def __next__(self) -> int:
        if self.number == self.mark:
            self.reached.set()
        if self.number == self.stop:
            raise StopIteration
        self.number += 1
        return self.number - 1

    def __del__(self) -> None:
        self.gone.set()


def test_items_come_in_their_order_and_end() -> None:
    ahead = ReadAhead(Counter(stop=20), depth=3)
    assert list(ahead) == list(range(20))
    assert list(ahead) == []


def test_so_many_wait_and_no_more() -> None:
    items = Counter(mark=4)
    ahead = ReadAhead(items, depth=5)
    assert items.reached.wait(10), "nobody has asked, and four were read"
    assert items.number <= 5
    assert [next(ahead) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    assert items.number <= 11, "five beyond the six that were taken"


def test_an_error_comes_where_the_item_would_have() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    ahead = ReadAhead(items(), depth=5)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            next(ahead)


def test_the_thread_ends_when_nobody_reads_any_more() -> None:
    items = Counter()
    gone = items.gone
    ahead = ReadAhead(items, depth=2)
    assert next(ahead) == 0
    del items, ahead
    gc.collect()
    assert gone.wait(10), "the thread still holds the items"
