"""The Python stacks of a rank, in RUN_DIR/stacks/rank_00003.txt: written by it, read by the doctor.

faulthandler writes them, whatever the threads do, also while C code holds Python's lock.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from megatron_lite.health.record import spans

STACKS = "stacks"
ASK = signal.SIGUSR2
"""Lets a rank write its stacks at once."""
_HEAD = "==="
_WAIT, _POLL = 3.0, 0.1
_THREAD = re.compile(r"^(?:Current t|T)hread 0x[0-9a-f]+", re.MULTILINE)
_WATCHERS = re.compile(r"megatron_lite.health.(watch|watchdog|stacks|stopping)\.py")


def path_of(run_dir: Path, rank: int) -> Path:
    """Where a rank writes."""
    return run_dir / STACKS / f"rank_{rank:05d}.txt"


def create(run_dir: Path, rank: int) -> TextIO:
    """An empty file for this start of a rank; a process of an earlier one may still write."""
    path = path_of(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}")
    file = new.open("w")
    new.replace(path)
    return file


def answer(file: TextIO) -> None:
    """From now on write stacks to `file` when ASK comes, which ends the process otherwise."""
    faulthandler.register(ASK, file=file, all_threads=True)


def write(file: TextIO, why: str) -> None:
    """Add the stacks of all threads of this process."""
    file.write(f"{_HEAD} {time.strftime('%Y-%m-%d %H:%M:%S')}, {why}\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)


def ask(run_dir: Path, processes: Mapping[int, int]) -> dict[int, int]:
    """Let ranks of this machine write their stacks; `processes` are their ids, by rank.

    Returns where in its file the answer of each begins; one that does not answer is left out. The
    signal would end a process that is no rank.
    """
    before = {rank: _size(run_dir, rank) for rank in processes}
    for pid in processes.values():
        with suppress(OSError):
            os.kill(pid, ASK)
    sizes, deadline = before, time.monotonic() + _WAIT
    while time.monotonic() < deadline:
        time.sleep(_POLL)
        last, sizes = sizes, {rank: _size(run_dir, rank) for rank in processes}
        if sizes == last and all(sizes[rank] > before[rank] for rank in processes):
            break
    return {rank: size for rank, size in before.items() if sizes[rank] > size}


def lines(run_dir: Path, starts: Mapping[int, int | None]) -> list[str]:
    """What ranks wrote last, equal stacks once, without the threads that only watch; `starts` says
    where in their files that begins, if it is known."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, start in starts.items():
        groups[_shortened(_newest(run_dir, rank, start))].append(rank)
    found = []
    for text, equal in groups.items():
        if text:
            found += [f"stacks of {spans(equal)}:", *(f"  {s}" for s in text.splitlines()), ""]
        else:
            found += [f"no stacks of {spans(equal)}", ""]
    return found


def _newest(run_dir: Path, rank: int, start: int | None) -> str:
    """The stacks from `start` on, or those that the rank wrote by itself last and all since."""
    try:
        data = path_of(run_dir, rank).read_bytes()
    except FileNotFoundError:
        return ""
    if start is None:
        start = max(data.rfind(f"{_HEAD} ".encode()), 0)
    return data[start:].decode(errors="replace").strip()


def _shortened(text: str) -> str:
    """Without ids of threads, which differ, and without threads that always wait in health/."""
    # The threads of this process follow each other without a line between them.
    head, *threads = _THREAD.split(text)
    kept = [thread.strip() for thread in threads if not _WATCHERS.search(thread)]
    return "\n".join([*([head.strip()] if head.strip() else []), *(f"Thread {t}" for t in kept)])


def _size(run_dir: Path, rank: int) -> int:
    try:
        return path_of(run_dir, rank).stat().st_size
    except FileNotFoundError:
        return 0
