"""Worker processes that answer in the order of the questions, and whose death is noticed.

The standard pools either wait for a dead worker for ever or can't tell its signal. Called by
preprocess.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from megatron_lite.data.errors import WorkerDiedError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 4  # items a worker; bounds the answers that wait for a slow earlier one


def _serve(
    build: Callable[[], Callable[[Any], Any]], connection: Connection, others: list[Connection]
) -> None:
    """Answer items until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:  # copies from the fork would hide the parent's death from the siblings
        other.close()
    work = build()
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = (True, work(item))
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except BrokenPipeError:
            return


class WorkerPool(Generic[Item, Result]):
    """`workers` processes, each with the function that `build` makes in it.

    A context manager: leaving it ends all processes, whatever happened. Open it before files that
    the workers must not inherit.
    """

    def __init__(self, build: Callable[[], Callable[[Item], Result]], *, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_serve, args=(build, theirs, list(self._connections)), daemon=True
            )
            process.start()
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
        for connection in self._connections:
            connection.close()

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results in the order of the items.

        WorkerDiedError names a worker that ended and its signal; RuntimeError carries the traceback
        of an exception in a worker.
        """
        source = enumerate(items)
        idle = list(range(len(self._processes)))
        busy: dict[Connection, tuple[int, int, Item]] = {}  # connection → worker, number, item
        done: dict[int, Result] = {}
        handed = yielded = 0
        exhausted = False
        while True:
            while idle and not exhausted and handed - yielded < _AHEAD * len(self._processes):
                try:
                    number, item = next(source)
                except StopIteration:
                    exhausted = True
                    break
                worker = idle.pop()
                busy[self._connections[worker]] = (worker, number, item)
                self._send(worker, item)
                handed = number + 1
            if not busy and yielded == handed:
                return
            ready = set(wait(list(busy))) if busy else set()
            for connection in [connection for connection in busy if connection in ready]:
                worker, number, item = busy.pop(connection)
                done[number] = self._receive(worker, item)
                idle.append(worker)
            while yielded in done:
                yield done.pop(yielded)
                yielded += 1

    def _send(self, worker: int, item: Item) -> None:
        try:
            self._connections[worker].send(item)
        except OSError as error:
            raise self._died(worker, item) from error

    def _receive(self, worker: int, item: Item) -> Result:
        try:
            good, result = self._connections[worker].recv()
        except (EOFError, OSError) as error:
            raise self._died(worker, item) from error
        if not good:
            raise RuntimeError(f"a worker failed on {item}:\n{result}")
        return result

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
