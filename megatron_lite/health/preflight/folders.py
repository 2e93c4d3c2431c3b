"""Files and folders of a run as one rank sees them: readable, writable, the same, with room.

A shared folder is tried out: rank 0 makes a folder of a random name in it, every rank leaves a file
there, as in every save of a checkpoint, and rank 0 looks for all of them. Called by the preflight.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.config.blend import parse_blend
from megatron_lite.config.rules.files import CORPORA
from megatron_lite.config.schema import RunConfig
from megatron_lite.config.tokenizer_files import TOKENIZER_FILES

SETTLE = 5.0
"""Seconds that a network file system is given to show on one node what another has made."""
LOOK_AGAIN = 0.2


@dataclass(frozen=True)
class Folder:
    """A folder that the run writes to."""

    name: str
    """What the user calls it: a field of the config or an environment variable."""
    path: Path
    needed: bool = True
    """False where the run may do without writing there."""


def shared_folders(config: RunConfig, run_dir: Path) -> list[Folder]:
    """Those that must be one and the same for all ranks."""
    folders = [Folder("run folder", run_dir.absolute())]
    if config.checkpoint.save is not None:
        folders.append(Folder("checkpoint.save", (run_dir / config.checkpoint.save).absolute()))
    return folders


def own_folders(config: RunConfig, env: Mapping[str, str]) -> Iterator[Folder]:
    """Those that each node has for itself: caches of compiled kernels, and swap files."""
    home = env.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions"
    yield Folder("TORCH_EXTENSIONS_DIR", Path(home), needed=False)
    if config.training.compile and (cache := env.get("TORCHINDUCTOR_CACHE_DIR")):
        yield Folder("TORCHINDUCTOR_CACHE_DIR", Path(cache))
    zero = config.deepspeed.zero_optimization
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        if offload.device == "nvme" and offload.nvme_path is not None:
            field = f"deepspeed.zero_optimization.{name}.nvme_path"
            yield Folder(field, Path(offload.nvme_path))


def inputs(config: RunConfig, run_dir: Path) -> dict[str, Path]:
    """What is read, by its field and name."""
    data, found = config.data, []
    for name in CORPORA:
        path = getattr(data, name)
        for _, prefix in parse_blend(path) if path is not None else ():
            found += [(name, f"{prefix}{end}") for end in (".bin", ".idx")]
    for name in TOKENIZER_FILES[data.tokenizer_type]:
        if (path := getattr(data, name)) is not None:
            found.append((name, path))
    paths = {f"data.{name} {path}": Path(path) for name, path in found}
    if config.checkpoint.load is not None:
        load = run_dir / config.checkpoint.load
        paths[f"checkpoint.load {load}"] = load
    return paths


def describe_input(path: Path) -> str:
    """What must be the same on every rank: a file's size, the names in a folder, or what fails."""
    try:
        if path.is_dir():
            names = sorted(os.listdir(path))
            digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
            return f"{len(names)} entries (names' hash {digest})"
        with path.open("rb") as file:
            file.read(1)
            return f"{os.fstat(file.fileno()).st_size} bytes"
    except FileNotFoundError:
        return "not there"
    except OSError as error:
        return f"can't be read ({error.strerror})"


def free_space(config: RunConfig, run_dir: Path, env: Mapping[str, str]) -> dict[str, int]:
    """Bytes left in every folder that the run writes to, by its name."""
    free = {}
    for folder in (*shared_folders(config, run_dir), *own_folders(config, env)):
        try:
            free[folder.name] = shutil.disk_usage(existing(folder.path)).free
        except OSError:
            continue  # that it can't be written is told by others
    return free


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def refuses(path: Path) -> str:
    """Why nothing can be written in a folder of this node, or where it would be made; "" if it
    can."""
    try:
        with tempfile.TemporaryFile(dir=existing(path)):
            return ""
    except OSError as error:
        return f"can't be written ({error.strerror})"


@dataclass(frozen=True)
class Trial:
    """Where in a shared folder the ranks meet."""

    folder: str
    """The name of the shared folder."""
    above: int
    """How many levels above it rank 0 found the first folder that is there."""
    token: str

    def place(self, path: Path) -> Path:
        """The meeting place as one rank sees it, `path` being what it takes for the folder."""
        levels = (path, *path.parents)
        return levels[min(self.above, len(levels) - 1)] / f".preflight-{self.token}"


def begin(folder: Folder, token: str) -> Trial:
    """Rank 0 makes the meeting place. OSError where it can't."""
    above = (folder.path, *folder.path.parents).index(existing(folder.path))
    trial = Trial(folder.name, above, token)
    trial.place(folder.path).mkdir()
    return trial


def take_part(trial: Trial, path: Path, rank: int) -> str:
    """Leave a file at the meeting place; returns why that is impossible, or "".

    Rank 0 made it before: who does not find it looks at another folder.
    """
    place, deadline = trial.place(path), time.monotonic() + SETTLE
    while True:
        try:
            (place / str(rank)).touch(exist_ok=False)
            return ""
        except FileNotFoundError:
            if time.monotonic() < deadline:
                time.sleep(LOOK_AGAIN)
                continue
            if not os.path.exists(place.parent):
                return f"{trial.folder} {path}: is not there"
            return f"{trial.folder} {path}: is not the folder that rank 0 has under this name"
        except OSError as error:
            return f"{trial.folder} {path}: can't be written ({error.strerror})"


def unseen(trial: Trial, path: Path, ranks: Iterable[int]) -> list[int]:
    """The ranks whose files rank 0 does not see at the meeting place, though they were made."""
    place, deadline, wanted = trial.place(path), time.monotonic() + SETTLE, set(ranks)
    while missing := wanted - {int(name) for name in os.listdir(place) if name.isdigit()}:
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_AGAIN)
    return sorted(missing)


def end(trial: Trial, path: Path) -> None:
    """Rank 0 removes the meeting place with everything in it."""
    shutil.rmtree(trial.place(path), ignore_errors=True)
