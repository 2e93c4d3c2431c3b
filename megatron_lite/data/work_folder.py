"""The folder in which preprocessing keeps its work until it is whole, so that it can be resumed.

It lies beside the output: `manifest.json` says what is being made of what, `committed.json` how far
it is, and each output has its tokens, lengths of sequences and sequences of documents. What lies in
those files beyond the committed sizes doesn't count. Called by preprocess.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from megatron_lite.data.encoding import FieldResult
from megatron_lite.data.errors import DataError
from megatron_lite.data.files import atomic_writer
from megatron_lite.data.index_writer import write_index
from megatron_lite.data.indexed_dataset import bin_path, idx_path

_MANIFEST = "manifest.json"
_COMMITTED = "committed.json"
_PARTS = ("tokens", "lengths", "sequences")
_MUCH = 1 << 24  # bytes
_SHOWN = 3  # differences from another command that are named

State = dict[str, Any]
_Appended = tuple[dict[str, int], Callable[[], State]]
"""The size of each file, and what tells the state at that point."""


class WorkFolder:
    """A context manager. Leaving it commits what was appended, or deletes a folder without work.

    After a DataError nothing more is committed: short work is then gone, and the input, once it is
    mended, meets no old folder. One process at a time: a second one gets a DataError.
    """

    def __init__(
        self,
        path: str | Path,
        identity: Mapping[str, Any],
        keys: Sequence[str],
        *,
        restart: bool = False,
        resumable: bool = True,
    ) -> None:
        """Open the folder, anew or where it was left; `state` is then what was committed last.

        Work that isn't `resumable`, because its input can be read only once, is never committed.
        DataError when the folder holds work of another identity, unless `restart` throws that away,
        and when it can't be written.
        """
        self.path = Path(path)
        self.state: State | None = None
        self.complete = False
        """Whether all is there and only `publish` remains."""
        self._keys = list(keys)
        self._resumable = resumable
        self._files: dict[str, BinaryIO] = {}
        self._commit: Future[None] | None = None
        self._last = time.monotonic()
        self._appended: _Appended | None = None
        self._committed: _Appended | None = None
        self._lock = self._locked()
        try:
            self._open(self._resume(dict(identity), restart=restart))
        except BaseException:
            self._lock.close()
            raise
        self._committer = ThreadPoolExecutor(1)

    def _locked(self) -> BinaryIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("ab")
        except OSError as error:
            raise DataError(f"{self.path}: can't be written: {error.strerror}") from error
        try:
            # Of this process alone: workers that outlive it for a moment don't hold it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise DataError(
                f"{self.path}: another process is writing this prefix; wait for it or choose "
                f"another output prefix"
            ) from error
        return lock

    def _resume(self, identity: dict[str, Any], *, restart: bool) -> dict[str, int]:
        """Return the committed size of each file."""
        if (self.path / _COMMITTED).exists() and not restart:
            found = json.loads((self.path / _MANIFEST).read_text(encoding="utf-8"))
            if differences := _differences(found, json.loads(json.dumps(identity))):
                raise DataError(
                    f"{self.path}: holds the work of another command: "
                    f"{'; '.join(differences[:_SHOWN])}. Repeat that command to finish its work, "
                    f"or throw it away with --restart"
                )
            committed = json.loads((self.path / _COMMITTED).read_text(encoding="utf-8"))
            self.state, self.complete = committed["state"], committed["complete"]
            sizes: dict[str, int] = committed["sizes"]
            self._committed = (sizes, lambda: committed["state"])
            return sizes
        (self.path / _COMMITTED).unlink(missing_ok=True)  # before what it speaks of
        for path in self.path.iterdir():
            if path.name != "lock":
                path.unlink()
        with atomic_writer(self.path / _MANIFEST) as file:
            file.write(json.dumps(identity, indent=1).encode())
        return {}

    def _open(self, sizes: dict[str, int]) -> None:
        for key in () if self.complete else self._keys:
            for part in _PARTS:
                path = self._path(key, part)
                file = self._files[path.name] = path.open("ab", buffering=0)
                file.truncate(sizes.get(path.name, 0))

    def _path(self, key: str, part: str) -> Path:
        return self.path / f"{self._keys.index(key)}.{part}"  # a key may be no name of a file

    def append(self, fields: Mapping[str, FieldResult], state: Callable[[], State]) -> None:
        """Append the documents of each key; `state` tells, later, what a resumed run must know."""
        for key, result in fields.items():
            for part in _PARTS:
                _write(self._files[self._path(key, part).name], getattr(result, part))
        self._appended = ({name: file.tell() for name, file in self._files.items()}, state)

    def commit_if_due(self, seconds: float) -> None:
        """Commit after so many seconds, or after much work if the disk has nothing else to do.

        The latter costs nothing, and leaves little to write at the end.
        """
        if self._appended is None:
            return
        before = self._committed[0] if self._committed else {}
        new = sum(self._appended[0].values()) - sum(before.values())
        idle = self._commit is None or self._commit.done()
        if time.monotonic() - self._last > seconds or (idle and new > _MUCH):
            self.commit()

    def commit(self) -> None:
        """Make what was appended outlast any end, in the background; waits for the commit before.

        OSError when the disk refuses, at the latest at the next commit.
        """
        self.wait()
        self._last = time.monotonic()
        if self._resumable and self._appended is not None:
            self._committed, self._appended = self._appended, None
            sizes, state = self._committed
            self._commit = self._committer.submit(self._sync, sizes, state(), complete=False)

    def _sync(self, sizes: dict[str, int], state: State, *, complete: bool) -> None:
        for name, file in self._files.items():
            if name.endswith(".tokens") or not complete:  # the index then holds the rest
                os.fsync(file.fileno())
        content = {"sizes": sizes, "state": state, "complete": complete}
        with atomic_writer(self.path / _COMMITTED) as file:
            file.write(json.dumps(content).encode())

    def wait(self) -> None:
        """Wait for the commit that is under way."""
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.result()

    def publish(self, prefixes: Mapping[str, str], dtype: np.dtype) -> None:
        """Give every key's pair of files its final name; then the folder is gone.

        Nothing has a final name before everything is whole, and a publication that was interrupted
        is finished by the next one.
        """
        if not self.complete:
            self.wait()
            for key in self._keys:
                with atomic_writer(self._path(key, "index")) as file:
                    lengths, sequences = (self._read(key, part) for part in _PARTS[1:])
                    write_index(file, dtype, lengths, sequences)
            sizes, state = self._appended or self._committed or ({}, dict)
            self._sync(sizes, state(), complete=True)
            self._appended = None
        for key, prefix in prefixes.items():
            tokens, index = self._path(key, "tokens"), self._path(key, "index")
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
            if tokens.exists():
                # An index of an older run must never stand beside the new tokens.
                idx_path(prefix).unlink(missing_ok=True)
                tokens.replace(bin_path(prefix))
            if index.exists():
                index.replace(idx_path(prefix))
        self._remove()

    def _read(self, key: str, part: str) -> np.ndarray:
        path = self._path(key, part)
        if not path.stat().st_size:
            return np.empty(0, dtype=np.int32)
        return np.memmap(path, dtype=np.int32, mode="r")

    def _remove(self) -> None:
        # The commit goes first: without it the rest is nothing to resume.
        (self.path / _COMMITTED).unlink(missing_ok=True)
        shutil.rmtree(self.path)

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.path.exists():
                if kind is None or not issubclass(kind, DataError):
                    self.commit()
                self.wait()
                if not (self.path / _COMMITTED).exists():
                    self._remove()
        finally:
            self._committer.shutdown()
            for file in (*self._files.values(), self._lock):
                file.close()


def _write(file: BinaryIO, values: np.ndarray) -> None:
    rest = memoryview(values.data).cast("B") if values.size else memoryview(b"")
    while rest:
        rest = rest[file.write(rest) :]


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return what differs between two commands; one that only skips more may go on."""
    return [
        f"{name} was {found.get(name)}, now {wanted.get(name)}"
        for name in (*found, *(name for name in wanted if name not in found))
        if found.get(name) != wanted.get(name)
        and not (name.startswith("skip") and wanted.get(name) is True)
    ]
