"""Contestants as processes of their own, seen from train_step.py: start, ask, end.

A process answers one line of JSON for each command; while it is not asked it sleeps.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from work import Shape

HERE = Path(__file__).resolve().parent


class Contestant:
    """One contestant: a process, or `ranks` of them that train one model together."""

    def __init__(
        self,
        name: str,
        program: str,
        shape: Shape,
        folder: Path,
        *,
        threads: int,
        ranks: int = 1,
        compiled: bool = False,
        empty_cache: bool = True,
    ) -> None:
        """`empty_cache`: compile as a first run does, whatever was compiled here before."""
        self.name, self.compiled, self.ranks = name, compiled, ranks
        self._log = folder / f"{name}.log"
        spec = {"contestant": program, "shape": shape.as_dict(), "compile": compiled}
        spec |= {"folder": str(folder), "run_dir": str(folder / name)}
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": "cpu",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        if empty_cache:
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor-{name}")
        self._processes = [
            self._start(json.dumps(spec), environment | {"RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(ranks)
        ]

    def _start(self, spec: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(HERE / "contestants.py"), spec],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | environment,
            )

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Every rank's answer; RuntimeError with the end of the log where a process ended."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended; its missing answer tells
                process.stdin.write(command + "\n")
                process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            code, log = process.wait(), self._log.read_text()[-3000:]
            raise RuntimeError(f"{self.name} ended (exit code {code}; -9: out of memory?):\n{log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> float:
        """Seconds of one step, the slowest rank's."""
        return max(answer["seconds"] for answer in self.ask("step"))

    def peak_bytes(self) -> int:
        """Largest resident memory so far, all ranks together."""
        return sum(answer["bytes"] for answer in self.ask("peak"))

    def __enter__(self) -> Contestant:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
