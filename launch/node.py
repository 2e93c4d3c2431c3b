"""The ranks of one host: launch/hosts.py starts this on each of them, through ssh.

It is told by a line of JSON on its standard input, so no shell sees a value and no list of
processes shows one. A line `leave` asks the ranks to save and leave. The end of the input means
that the launcher or the connection is gone: the ranks are ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.outcome import Outcome  # noqa: E402

GRACE = 20.0
"""Seconds between SIGTERM and SIGKILL for the ranks of a job that has lost one."""
WELL = (0, 3)
"""Exit codes of ranks that leave together with the others: done, stopped on request."""
BY_SIGNAL = 128


class Node:
    """The processes of this host."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._ranks: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._codes: list[int] = []
        self._ending = False
        self._deadline: float | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Until all ranks have ended; returns the code of the first that failed, if any."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        for local in range(self._order["slots"]):
            self._start(local)
        while self._ranks:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            events = self._selector.select(left)
            if not events:
                self._deadline = None
                self._signal(signal.SIGKILL)
            for key, _ in events:
                if key.fileobj is sys.stdin:
                    self._hear()
                else:
                    self._reap(key.fd)
        failed = [code for code in self._codes if code not in WELL]
        return failed[0] if failed else max(self._codes)

    def _start(self, local: int) -> None:
        order = self._order
        rank = order["first_rank"] + local
        facts = {"RANK": rank, "LOCAL_RANK": local, "MEGATRON_LITE_NODE": order["host"]}
        environment = {**os.environ, **order["environment"]}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment |= {name: str(value) for name, value in facts.items()}
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
        process = subprocess.Popen(
            [sys.executable, "-m", order["module"], *order["arguments"]],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        handle = os.pidfd_open(process.pid)
        self._ranks[handle] = (rank, process)
        self._selector.register(handle, selectors.EVENT_READ)

    def _hear(self) -> None:
        said = os.read(sys.stdin.fileno(), 4096)
        if said:
            self._signal(signal.SIGTERM)
            return
        self._selector.unregister(sys.stdin)
        self._codes.append(1)
        self._end()

    def _reap(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        rank, process = self._ranks.pop(handle)
        code = process.wait()
        if code not in WELL and not self._ending:
            self._tell(rank, code)
            self._end()
        self._codes.append(code if code >= 0 else BY_SIGNAL - code)

    def _tell(self, rank: int, code: int) -> None:
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        name = self._order["host"]
        print(f"{name}: rank {rank} ended with {how}", file=sys.stderr, flush=True)
        if code < 0:
            said = f"ended without a word: {how} on {name}"
            Outcome(Path(self._order["run_dir"]), rank=rank).end("failed", said)

    def _end(self) -> None:
        self._ending, self._deadline = True, time.monotonic() + GRACE
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        """To all ranks; one that must be killed takes its loader's workers with it."""
        for _, process in self._ranks.values():
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)


def main() -> int:
    """Read the order and carry it out."""
    with open(0, "rb", buffering=0, closefd=False) as line:  # and not a byte of what follows
        order = json.loads(line.readline())
    try:
        os.chdir(order["folder"])
    except OSError as error:
        print(f"{order['host']}: {error}", file=sys.stderr)
        return 2
    return Node(order).run()


if __name__ == "__main__":
    sys.exit(main())
