"""Whole processes: training under torchrun, or forked with main's arguments, and what is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.distributed.ranks import PRELOAD
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
MARK = "MEGATRON_LITE_TEST_JOB"
WATCHDOG = 180.0
"""Seconds; a loaded machine takes minutes to start a few processes."""


@dataclass
class Job:
    """A launcher with its ranks; every process of it carries a mark in its environment."""

    launcher: subprocess.Popen[str]
    mark: str
    started: float = field(default_factory=time.monotonic)

    def alive(self) -> list[int]:
        """Process ids of everything that the job started and that has not ended."""
        return [pid for pid in _processes() if f"{MARK}={self.mark}" in _environment(pid)]

    def finish(self, timeout: float = WATCHDOG) -> tuple[int, str, str]:
        """Exit code, output and errors of the launcher."""
        out, err = self.launcher.communicate(timeout=timeout)
        return self.launcher.returncode, out, err

    def wait_until_empty(self, timeout: float) -> float:
        """Seconds until no process was left; AssertionError, naming them, if that takes longer."""
        start = time.monotonic()
        while left := self.alive():
            if time.monotonic() - start > timeout:
                raise AssertionError(f"still there after {timeout} s: {list(map(_command, left))}")
            time.sleep(0.1)
        return time.monotonic() - start


@contextlib.contextmanager
def torchrun(
    processes: int,
    config: Path,
    run_dir: Path,
    *overrides: str,
    module: str = "megatron_lite.train",
    env: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Start training under torchrun, in a process group of its own; kills what is left then."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(processes), "-m", module]
    with started([*command, *arguments(config, run_dir, *overrides)], env) as job:
        yield job


@contextlib.contextmanager
def deepspeed(
    processes: int,
    config: Path,
    run_dir: Path,
    *overrides: str,
    module: str = "megatron_lite.train",
    env: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """The same under deepspeed's launcher; AssertionError where shared memory is left behind."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(processes)]
    command += ["--module", module]
    before = shared_memory()
    with started([*command, *arguments(config, run_dir, *overrides)], env) as job:
        yield job
    assert shared_memory() <= before


def shared_memory() -> set[Path]:
    """What DeepSpeed holds of this machine's shared memory."""
    return set(Path("/dev/shm").glob("deepspeed_*"))


@contextlib.contextmanager
def started(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Job]:
    """A launcher in a process group of its own; kills what is left of its job in the end."""
    mark = uuid.uuid4().hex
    launcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, **(env or {})},
        start_new_session=True,
    )
    job = Job(launcher, mark)
    try:
        yield job
    finally:
        for pid in job.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        launcher.wait()


def arguments(config: Path, run_dir: Path, *overrides: str) -> list[str]:
    """megatron_lite.train's own arguments."""
    sets = [word for override in overrides for word in ("--set", override)]
    return [str(config), "--run-dir", str(run_dir), *sets]


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it printed."""

    code: int
    out: str
    err: str


def fork_main(
    argv: Sequence[str], *, processes: int = 1, env: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run megatron_lite.train's main in `processes` new processes, as srun would start them.

    They are forks of a process that has imported everything, so that it takes no seconds; one alone
    gets no rank and no world size. Raises AssertionError after WATCHDOG seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranked = _ranked(processes) if processes > 1 else [{}]
    logs = Path(os.environ.get("TMPDIR", "/tmp")) / f"fork-{uuid.uuid4().hex}"
    children = []
    for rank, place in enumerate(ranked):
        paths = (f"{logs}-{rank}.out", f"{logs}-{rank}.err")
        extra = {"OMP_NUM_THREADS": "1", **place, **(env or {})}
        child = context.Process(target=_child, args=(list(argv), extra, paths))
        child.start()
        children.append((child, paths))
    deadline = time.monotonic() + WATCHDOG
    for child, _ in children:
        child.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, (child, _) in enumerate(children) if child.is_alive()]
    for child, _ in children:
        child.kill()
        child.join()
    texts = [[Path(path).read_text() for path in paths] for _, paths in children]
    for _, paths in children:
        for path in paths:
            Path(path).unlink()
    assert not late, f"ranks {late} did not end in time: {texts}"
    return [Ended(child.exitcode, *text) for (child, _), text in zip(children, texts, strict=True)]


def _ranked(processes: int) -> list[dict[str, str]]:
    (port,) = free_ports(1)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(processes)]


def _child(argv: list[str], env: dict[str, str], paths: tuple[str, str]) -> None:
    from megatron_lite.train import main
    from tests.distributed import bad_node, faulty

    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)
    if "BAD_NODE" in env:
        bad_node.install(env["BAD_NODE"])
    if "FAULT" in env:
        faulty.install(env["FAULT"], env.get("DEAF", ""))
    sys.exit(main(argv))


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> str:
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except (OSError, IndexError):
        return ""


def _command(pid: int) -> str:
    try:
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return str(pid)
