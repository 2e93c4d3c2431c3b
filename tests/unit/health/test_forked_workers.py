"""Loader workers live as long as their rank wants, whatever is sent to a group of processes."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import multiprocessing, os, signal, subprocess, time
from megatron_lite.health.watch import parent_of, when_signalled

got = []
when_signalled(got.append)
context = multiprocessing.get_context("fork")
worker = context.Process(target=time.sleep, args=(60,))
worker.start()
assert parent_of(worker.pid) == os.getpid() and parent_of(os.getpid()) == os.getppid()
for number in (signal.SIGINT, signal.SIGTERM):
    subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    os.kill(os.getpid(), number)
worker.join(0.5)
assert worker.is_alive(), "others may send what they like"
worker.terminate()
worker.join(10)
assert worker.exitcode == 143, worker.exitcode
assert parent_of(worker.pid) == 0
assert got == [signal.SIGINT, signal.SIGTERM], got
"""


def test_workers_heed_their_parent_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
