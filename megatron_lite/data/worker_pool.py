"""Worker processes that answer in the order of the questions, and whose death is noticed.

The standard pools either wait for a dead worker for ever or can't tell its signal. Called by
preprocess.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from megatron_lite.data.channel import Channel
from megatron_lite.data.errors import WorkerDiedError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 4  # items a worker; bounds the answers that wait for a slow earlier one
_HANDED = 2  # items a worker has at a time, so that it never waits for the next

_END = object()


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _serve(
    build: Callable[[], Callable[[Any], Any]], channel: Channel, others: list[Channel]
) -> None:
    """Answer items until the parent closes the channel or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    for other in others:  # copies from the fork would hide the parent's death from the siblings
        other.close()
    work = build()
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread takes items in while an answer is being sent: two full pipes would wait for each
    # other for ever.
    threading.Thread(target=_take_in, args=(channel, items), daemon=True).start()
    while (item := items.get()) is not _END:
        try:
            answer: tuple[bool, Any] = (True, work(item))
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            channel.send(answer)
        except OSError:
            return


def _take_in(channel: Channel, items: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            items.put(channel.receive()[0])
    except (EOFError, OSError):
        items.put(_END)


class WorkerPool(Generic[Item, Result]):
    """`workers` processes, each with the function that `build` makes in it.

    A context manager: leaving it ends all processes, whatever happened. Open it before files that
    the workers must not inherit. A result's arrays hold
    only until the next result is asked for.
    """

    def __init__(self, build: Callable[[], Callable[[Item], Result]], *, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._channels: list[Channel] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for _ in range(workers):
            ours, theirs = Channel.pair()
            self._channels.append(ours)
            process = context.Process(
                target=_serve, args=(build, theirs, list(self._channels)), daemon=True
            )
            # Until _serve has its own, a worker would run the parent's handlers: a traceback, and
            # the signal is lost.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self._processes.append(process)

    def __enter__(self) -> WorkerPool[Item, Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        for channel in self._channels:
            channel.close()

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results in the order of the items.

        WorkerDiedError names a worker that ended and its signal; RuntimeError carries the traceback
        of an exception in a worker.
        """
        source = enumerate(items)
        # What each worker has been handed and hasn't answered: (number, item), oldest first.
        handed: list[deque[tuple[int, Item]]] = [deque() for _ in self._processes]
        done: dict[int, tuple[Result, Callable[[], None]]] = {}
        sent = yielded = 0
        while True:
            while sent - yielded < _AHEAD * len(self._processes):
                worker = min(range(len(handed)), key=lambda number: len(handed[number]))
                if len(handed[worker]) >= _HANDED or (entry := next(source, None)) is None:
                    break
                handed[worker].append(entry)
                self._send(worker, entry[1])
                sent += 1
            busy = [worker for worker, entries in enumerate(handed) if entries]
            if not busy and yielded == sent:
                return
            ready = wait([self._channels[worker].fileno() for worker in busy]) if busy else ()
            for worker in busy:
                if self._channels[worker].fileno() in ready:
                    number, item = handed[worker].popleft()
                    done[number] = self._receive(worker, item)
            while yielded in done:
                result, let_go = done.pop(yielded)
                yield result
                let_go()
                yielded += 1

    def _send(self, worker: int, item: Item) -> None:
        try:
            self._channels[worker].send(item)
        except OSError as error:
            raise self._died(worker, item) from error

    def _receive(self, worker: int, item: Item) -> tuple[Result, Callable[[], None]]:
        try:
            (good, result), let_go = self._channels[worker].receive()
        except (EOFError, OSError) as error:
            raise self._died(worker, item) from error
        if not good:
            raise RuntimeError(f"a worker failed on {item}:\n{result}")
        return result, let_go

    def _died(self, worker: int, item: Item) -> WorkerDiedError:
        process = self._processes[worker]
        process.join(timeout=5)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name} (signal {-code})"
        else:
            how = f"ended with exit code {code}"
        return WorkerDiedError(
            f"worker {worker + 1} of {len(self._processes)} (process {process.pid}) {how} while it "
            f"worked on {item}; if the system ran out of memory, use fewer workers"
        )
