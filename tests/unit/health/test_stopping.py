"""The notice of a batch system reaches the rank, and kills nothing that the rank has started."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, subprocess, sys, time
from megatron_lite.health.stopping import StopRequest

def heard():
    while stop.reason is None:
        time.sleep(0.01)
    print(stop.reason, flush=True)
    stop.reason = None

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # as train.sbatch does
os.kill(os.getpid(), signal.SIGUSR1)
stop = StopRequest()
stop.listen(signal.SIGUSR1)
heard()
compiler = subprocess.Popen(["sh", "-c", "echo begun; read line; echo $line"], stdin=-1, stdout=-1)
compiler.stdout.readline()
os.killpg(0, signal.SIGUSR1)
heard()
out, _ = compiler.communicate(b"compiled")
print(out.decode().strip(), compiler.returncode)
"""


def test_the_notice_to_a_whole_job_ends_no_compiler() -> None:
    """Nor is one lost that came before the rank could listen."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        start_new_session=True,
    )
    assert done.stdout.splitlines() == ["SIGUSR1", "SIGUSR1", "compiled 0"], done.stderr
