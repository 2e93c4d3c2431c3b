"""Read every byte of a checkpoint: is each file what was written, and which tensors do they hold?

Nothing is put together: a file is read once, from its beginning to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from megatron_lite.checkpoint.direct import DirectReader
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fingerprint import Fingerprints, box_fingerprint
from megatron_lite.checkpoint.manifest import Manifest, StoredBox, StoredFile
from megatron_lite.checkpoint.tensor_file import TensorReader, Values, stretches
from megatron_lite.sharding.placement import Box
from megatron_lite.sharding.plan import Boxes, copies

_READ_BYTES = 1 << 24


@dataclass
class Scan:
    """What was found in a folder."""

    files: dict[str, StoredFile] = field(default_factory=dict)
    fingerprints: Fingerprints = field(default_factory=Fingerprints)
    faults: list[str] = field(default_factory=list)
    """A line for each file that can't be read, or is not what the manifest says."""


def scan(
    folder: Path,
    boxes: Iterable[StoredBox],
    *,
    files: Mapping[str, StoredFile] | None = None,
    workers: int = 1,
    cast: Callable[[Values], Values] | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Scan:
    """Hash the files of `boxes`, and all `files` if given, and compare those with what they are.

    `cast` is what is done to values before they enter a fingerprint; `progress` is told the bytes.
    """
    held: dict[str, dict[str, StoredBox]] = {name: {} for name in files or ()}
    for box in boxes:
        held.setdefault(box.file, {})[box.key] = box

    def one(name: str) -> Scan:
        try:
            return _scan_file(folder / name, held[name], cast, progress)
        except CheckpointError as error:
            return Scan(faults=[str(error)])

    with ThreadPoolExecutor(workers) as pool:
        scans = list(pool.map(one, held))
    whole = merged(scans)
    for name, found in whole.files.items() if files is not None else ():
        whole.faults += compare_file(folder / name, found, (files or {}).get(name))
    return whole


def merged(scans: Iterable[Scan]) -> Scan:
    """What was found in several files, as one."""
    whole = Scan()
    for found in scans:
        whole.files |= found.files
        whole.fingerprints.update(found.fingerprints)
        whole.faults += found.faults
    return whole


def compare_file(path: Path, found: StoredFile, said: StoredFile | None) -> list[str]:
    """A line that says how a file is not what the manifest says; none if it is."""
    if said is None:
        return [f"{path}: is not in the manifest's list of files"]
    if found.bytes != said.bytes:
        return [f"{path}: has {found.bytes} bytes, {said.bytes} were written"]
    if found.xxh3_128 != said.xxh3_128:
        return [f"{path}: checksum {found.xxh3_128}, not {said.xxh3_128}: its bytes have changed"]
    return []


def _scan_file(
    path: Path,
    boxes: Mapping[str, StoredBox],
    cast: Callable[[Values], Values] | None,
    progress: Callable[[int], None],
) -> Scan:
    if not boxes:
        return Scan(files={path.name: file_facts(path, progress=progress)})
    fingerprints, digest, count = Fingerprints(), xxhash.xxh3_128(), 0
    reader, stream = TensorReader(path), DirectReader(path)
    try:
        header = np.empty(reader.data_start, dtype=np.uint8)
        count += stream.read_into(header)
        digest.update(header.data)
        for key in reader.keys:
            stored = boxes.get(key)
            if stored is None or reader.shape(key) != stored.box.size:
                raise CheckpointError(f"{path}: {key} is not what the manifest says")
            whole = Box((0,) * len(stored.box.size), stored.box.size)
            for part in stretches(whole, reader.dtype(key).itemsize):
                values = np.empty(part.size, dtype=reader.dtype(key))
                count += stream.read_into(values.reshape(-1).view(np.uint8))
                digest.update(values.data)
                offset = tuple(a + b for a, b in zip(part.offset, stored.box.offset, strict=True))
                taken = values if cast is None else cast(values)
                value = box_fingerprint(taken, Box(offset, part.size))
                fingerprints.add(stored.tensor, stored.state, value)
                progress(values.nbytes)
        if missing := sorted(boxes.keys() - set(reader.keys)):
            raise CheckpointError(f"{path}: holds no tensor {missing[0]}")
    finally:
        stream.close()
        reader.close()
    return Scan({path.name: StoredFile(count, digest.hexdigest())}, fingerprints)


def file_facts(path: Path, *, progress: Callable[[int], None] = lambda count: None) -> StoredFile:
    """Size and hash of a file as it lies on the disk; CheckpointError where it can't be read."""
    digest, size = xxhash.xxh3_128(), 0
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: is no file")
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
                size += len(block)
                progress(len(block))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    return StoredFile(size, digest.hexdigest())


def uncovered(manifest: Manifest) -> list[str]:
    """A line for each state of a tensor that the boxes don't hold exactly once."""
    faults = []
    for name, tensor in manifest.tensors.items():
        for state in manifest.states:
            boxes = manifest.stored.get((name, state), Boxes([]))
            try:
                copies(Box((0,) * len(tensor.shape), tensor.shape), boxes)
            except ValueError as error:
                faults.append(f"{name} ({state}): the boxes hold {error}")
            if boxes.overlap():
                faults.append(f"{name} ({state}): boxes overlap")
    return faults
