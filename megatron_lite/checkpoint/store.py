"""The folder of a run's checkpoints: names, the `latest` pointer, atomic commit, retention.

Knows nothing of what a checkpoint holds. Look-ups change nothing; the rest is called on one rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.errors import CheckpointError

LATEST = "latest"
CONFIG, ORIGINS = "config.json", "origins.json"
"""The resolved config of the run that saved, and where each of its values was written."""
RESUMABLE = "reshard.json"
"""Lies in an unfinished folder that the same command goes on with after a kill."""
_STEP = re.compile(r"global_step(0|[1-9]\d*)|\.global_step(0|[1-9]\d*)\.old")


def step_folder(root: Path, step: int) -> Path:
    """`<root>/global_step100`."""
    return root / f"global_step{step}"


def steps(root: Path) -> list[int]:
    """The steps that have a folder, ascending."""
    if not root.is_dir():
        return []
    found = (_step_of(entry) for entry in root.iterdir() if entry.is_dir())
    return sorted({step for step in found if step is not None})


def _step_of(folder: Path) -> int | None:
    match = _STEP.fullmatch(folder.name)
    return None if match is None else int(match[1] or match[2])


def _whole(root: Path, step: int) -> Path:
    """Where a step lies: under its name, or aside where a kill interrupted its replacing."""
    folder = step_folder(root, step)
    aside = _replaced(folder)
    return aside if aside.is_dir() and not folder.is_dir() else folder


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
        return _whole(root, step)
    pointer = root / LATEST
    if not pointer.is_file():
        return _whole(root, there[-1]) if there else None
    name = pointer.read_text(errors="replace").strip()
    latest = _step_of(Path(name))
    if latest not in there:
        raise CheckpointError(f"{pointer} names {name or 'nothing'}, which is not there; {listing}")
    return _whole(root, latest)


def candidates(root: Path, *, step: int | None, fall_back: bool) -> tuple[list[Path], list[str]]:
    """The checkpoints that may be loaded, best first, and a line for what was passed over.

    The first is what `find` finds; with `fall_back` those of earlier steps follow, and a `latest`
    that names none counts as passed over. Empty where there is no checkpoint.
    """
    try:
        newest = find(root, step=step)
    except CheckpointError as error:
        there = steps(root)
        if step is not None or not (fall_back and there):
            raise
        newest, lines = _whole(root, there[-1]), [str(error)]
    else:
        lines = []
    if newest is None:
        return [], lines
    return [newest, *(older(newest) if fall_back else [])], lines


def exists(root: Path, step: int) -> bool:
    """Whether the step has a folder."""
    return step in steps(root)


def unfinished(root: Path, step: int) -> Path:
    """The folder that a step is written into, before it gets its name."""
    return root / f".global_step{step}.tmp"


def older(folder: Path) -> list[Path]:
    """The checkpoints of earlier steps beside `folder`, newest first."""
    own = _step_of(folder)
    earlier = [step for step in steps(folder.parent) if own is not None and step < own]
    return [_whole(folder.parent, step) for step in reversed(earlier)]


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config of the run that saved, and origins; CheckpointError where they can't be read."""
    return read_json(folder, CONFIG), read_json(folder, ORIGINS)


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
    """An empty folder to write into; what a killed write of the same step left is removed."""
    root.mkdir(parents=True, exist_ok=True)
    sync(root.parent)
    recover(root)
    folder = unfinished(root, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def sweep(root: Path) -> None:
    """Remove what killed saves of any step left; a reshard's work is left to that command."""
    for left in _left(root):
        _delete(left)


def swept_bytes(root: Path) -> int:
    """What `sweep` would set free."""
    return sum(f.stat().st_size for left in _left(root) for f in left.rglob("*") if f.is_file())


def _left(root: Path) -> list[Path]:
    return [p for p in root.glob(".global_step*.tmp") if not (p / RESUMABLE).is_file()]


def require_space(root: Path, wanted: int) -> None:
    """CheckpointError where the file system of `root`, which may not be there yet, has less than
    `wanted` bytes left."""
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < wanted:
        raise CheckpointError(
            f"{root}: {in_bytes(wanted)} are needed, {in_bytes(free)} are free; delete old "
            "checkpoints (or lower checkpoint.keep_last), or write elsewhere"
        )


def in_bytes(count: int) -> str:
    """`2.9 MB` or `52.38 GB`."""
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


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
    try:
        folder.rename(doomed)
    except OSError as error:
        warnings.warn(f"{folder}: can't be deleted ({error})", stacklevel=2)
        return
    _delete(doomed)


def _delete(folder: Path) -> None:
    """Delete what nobody needs. That it is not possible now (a reader on a network file system
    keeps a file) is no reason to end a run; the next save tries again."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"{folder}: can't be deleted yet ({error})", stacklevel=2)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def recover(root: Path) -> None:
    """Where a kill interrupted the replacing of a step by a new save of it, keep the whole one."""
    for old in root.glob(".global_step*.old"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if target.exists():
            _delete(old)
        else:
            old.rename(target)


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
