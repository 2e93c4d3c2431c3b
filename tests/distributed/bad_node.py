"""One rank on a bad node, for tests of the preflight: `BAD_NODE=1:gpu7:code,clock` spoils rank 1.

Words: what the rank has or sees otherwise. `hang` keeps it from the all-reduce over its tensor
group, `stuck` from telling its facts, `frozen` from writing in a folder; then each rank seems to be
on a node of its own.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any, NoReturn

from megatron_lite.health.preflight import facts, folders, group_speed, groups, nodes

HANG_LIMIT = 3.0
"""Seconds after which an all-reduce is given up where one is made to hang."""
STUCK_LIMIT = 1.0
"""Seconds in which a rank must tell its facts where one is made to be stuck."""

FROZEN_LIMIT = 1.0
"""Seconds that are given where one does not come to write."""


def install(spec: str) -> None:
    """Patch this process as the variable says; every rank calls it."""
    victim, node, words = spec.split(":")
    if "hang" in words:
        group_speed.LIMIT = HANG_LIMIT
    if "stuck" in words:
        nodes.FACTS_LIMIT = STUCK_LIMIT
    if "frozen" in words:
        nodes.GRACE, folders.SETTLE = FROZEN_LIMIT, FROZEN_LIMIT / 2
        os.environ["SLURMD_NODENAME"] = f"gpu{os.environ['RANK']}"
    if os.environ.get("RANK") != victim:
        return
    os.environ["SLURMD_NODENAME"] = node
    for word in words.split(","):
        globals()[f"_{word}"]()


def _code() -> None:
    facts.code_hash = lambda folder: "another"


def _torch() -> None:
    versions = facts._versions()
    facts._versions = lambda: versions | {"torch": "2.12.0"}


def _clock() -> None:
    now = time.time
    time.time = lambda: now() + 400.0


def _nccl() -> None:
    os.environ["NCCL_ALGO"] = "Tree"


def _elsewhere() -> None:
    """The same name, another folder: not mounted here."""
    folders.SETTLE = 0.5
    there = Path(os.environ["ELSEWHERE"])
    own = folders.shared_folders
    folders.shared_folders = lambda config, run_dir: own(config, there)


def _readonly() -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    Path.touch = refuse  # type: ignore[method-assign]


def _stuck() -> None:
    """As in a file system that does not answer; long enough for the others to end."""
    facts.describe_input = lambda path: time.sleep(4.0) or ""


def _frozen() -> None:
    """Until somebody ends the node."""

    def freeze(*args: Any) -> NoReturn:
        time.sleep(4.0)
        os._exit(1)

    folders.take_part = freeze


def _hang() -> None:
    measure = groups.measure

    def late(kind: str, *args: Any) -> Any:
        if kind == "tensor":
            time.sleep(60)
        return measure(kind, *args)

    groups.measure = late
