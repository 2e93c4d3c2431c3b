"""The folder of a run's checkpoints: names, the `latest` pointer, atomic commit, retention.

Knows nothing of what a checkpoint holds. Called on one rank, except for the pure look-ups.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

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

    Without `latest` it is the newest: the first save was killed just before it wrote that file, and
    a folder has its name only once it is complete. Raises CheckpointError, naming the steps that
    exist, where the asked-for step is absent or `latest` points to a folder that is gone.
    """
    there = steps(root)
    listing = f"steps there: {', '.join(map(str, there))}" if there else "no checkpoint is there"
    if step is not None:
        if step not in there:
            raise CheckpointError(f"{root}: no checkpoint of step {step}; {listing}")
        return step_folder(root, step)
    pointer = root / LATEST
    if not pointer.is_file():
        return step_folder(root, there[-1]) if there else None
    target = root / pointer.read_text().strip()
    if not target.is_dir():
        raise CheckpointError(f"{pointer} names {target.name}, which is not there; {listing}")
    return target


def exists(root: Path, step: int) -> bool:
    """Whether the step has a folder."""
    return step in steps(root)


def unfinished(root: Path, step: int) -> Path:
    """The folder that a step is written into, before it gets its name."""
    return root / f".global_step{step}.tmp"


def older(folder: Path) -> list[Path]:
    """The checkpoints of earlier steps beside `folder`, newest first."""
    match = _STEP.fullmatch(folder.name)
    earlier = [s for s in steps(folder.parent) if match is not None and s < int(match[1])]
    return [step_folder(folder.parent, step) for step in reversed(earlier)]


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object that a checkpoint keeps; CheckpointError where it can't be read."""
    path = folder / name
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the checkpoint is not whole") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: damaged (it is no JSON object)")
    return value


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into; what a killed save left is removed."""
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    for left in root.glob(".global_step*.tmp"):
        shutil.rmtree(left)
    folder = unfinished(root, step)
    folder.mkdir()
    return folder


def require_space(root: Path, wanted: int) -> None:
    """CheckpointError where the file system of `root` has less than `wanted` bytes left."""
    free = shutil.disk_usage(root).free
    if free < wanted:
        raise CheckpointError(
            f"{root}: {wanted / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free; delete old "
            "checkpoints (or lower checkpoint.keep_last), or write elsewhere"
        )


def commit(written: Path, root: Path, step: int, *, keep_last: int | None) -> None:
    """Give a complete folder its name, move `latest` to it, then delete what is too old."""
    for path in written.iterdir():
        sync(path)
    sync(written)
    target = step_folder(root, step)
    if target.exists():
        target.rename(_replaced(target))
    written.rename(target)
    sync(root)
    recover(root)
    pointer = root / f".{LATEST}.tmp"
    pointer.write_text(target.name + "\n")
    sync(pointer)
    pointer.rename(root / LATEST)
    sync(root)
    if keep_last is not None:
        for old in [s for s in steps(root) if s <= step][:-keep_last]:
            _remove(step_folder(root, old))


def _remove(folder: Path) -> None:
    """Delete a checkpoint; one that is only half deleted no longer has its name."""
    doomed = folder.with_name(f".{folder.name}.tmp")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def recover(root: Path) -> None:
    """Where a kill interrupted the replacing of a step by a new save of it, keep the whole one."""
    for old in root.glob(".global_step*.old"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
