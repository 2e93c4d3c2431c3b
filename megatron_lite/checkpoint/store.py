"""The folder of a run's checkpoints: names, the `latest` pointer, atomic commit, retention.

Knows nothing of what a checkpoint holds. Called on one rank, except for the pure look-ups.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron_lite.checkpoint.errors import CheckpointError

LATEST = "latest"
_STEP = re.compile(r"global_step(\d+)")


def step_folder(root: Path, step: int) -> Path:
    """`<root>/global_step100`."""
    return root / f"global_step{step}"


def steps(root: Path) -> list[int]:
    """The steps that have a folder, ascending."""
    if not root.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in found if match)


def find(root: Path, *, step: int | None) -> Path | None:
    """The checkpoint of `step`, or the one that `latest` names; None where there is none at all.

    Raises CheckpointError, naming the steps that exist, where the asked-for step is absent or
    `latest` points to a folder that is gone.
    """
    there = steps(root)
    listing = f"steps there: {', '.join(map(str, there))}" if there else "no checkpoint is there"
    if step is not None:
        if step not in there:
            raise CheckpointError(f"{root}: no checkpoint of step {step}; {listing}")
        return step_folder(root, step)
    pointer = root / LATEST
    if not pointer.is_file():
        if there:
            raise CheckpointError(
                f"{root}: no file {LATEST}; {listing}; name one with checkpoint.ckpt_step"
            )
        return None
    target = root / pointer.read_text().strip()
    if not target.is_dir():
        raise CheckpointError(f"{pointer} names {target.name}, which is not there; {listing}")
    return target


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into; what a killed save left is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".global_step*.tmp"):
        shutil.rmtree(left)
    folder = root / f".global_step{step}.tmp"
    folder.mkdir()
    return folder


def commit(written: Path, root: Path, step: int, *, keep_last: int | None) -> None:
    """Give a complete folder its name, move `latest` to it, then delete what is too old."""
    for path in written.iterdir():
        sync(path)
    sync(written)
    target = step_folder(root, step)
    if target.exists():
        shutil.rmtree(target)
    written.rename(target)
    sync(root)
    pointer = root / f".{LATEST}.tmp"
    pointer.write_text(target.name + "\n")
    sync(pointer)
    pointer.rename(root / LATEST)
    sync(root)
    if keep_last is not None:
        for old in [s for s in steps(root) if s <= step][:-keep_last]:
            shutil.rmtree(step_folder(root, old))


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
