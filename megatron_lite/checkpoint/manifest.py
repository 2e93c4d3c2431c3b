"""The manifest of a checkpoint: what it holds and which file holds which box.

A person can read it, and so can any program that reads JSON and safetensors. It carries a checksum
of itself, since a digit that has changed in it would put numbers into the wrong place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.sharding.placement import Box, Cut
from megatron_lite.sharding.plan import Boxes, LogicalTensor

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Of a checkpoint to train on: master weights and Adam's two moments, each of them float32."""
WEIGHT = "weight"
"""The one state of a checkpoint of weights alone; its dtype is the manifest's."""
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""What safetensors calls a dtype."""
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{32})"')
_NO_CHECKSUM = b'"checksum": "' + b"0" * 32 + b'"'


@dataclass(frozen=True)
class StoredBox:
    """Where a box of one state of a logical tensor lies: under `key` in `file`."""

    tensor: str
    state: str
    box: Box
    file: str
    key: str

    @classmethod
    def named(cls, tensor: str, state: str, box: Box, file: str) -> StoredBox:
        """With the key that every writer gives it."""
        return cls(tensor, state, box, file, f"{tensor}|{state}|{','.join(map(str, box.offset))}")


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and xxh3_128 of a file, in hexadecimal."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its numbers."""

    progress: dict[str, Any]
    """Trainer's position: iteration, consumed samples, applied updates, …"""
    scalars: dict[str, Any]
    """State that all ranks share: optimizer step, loss scaler."""
    layout: dict[str, int]
    """Sizes of the axes that it was saved from."""
    model: dict[str, Any]
    """The model section of the config."""
    tensors: dict[str, LogicalTensor]
    """Every logical tensor: its shape, and how tensor parallelism cuts it on any layout."""
    boxes: list[StoredBox]
    files: dict[str, StoredFile]
    """Those with tensors."""
    dtype: str = "float32"
    """Of all logical tensors."""
    fingerprints: dict[tuple[str, str], int] = field(default_factory=dict)
    """Of each (tensor, state), taken from memory when it was saved; empty if it was not."""
    texts: dict[str, StoredFile] = field(default_factory=dict)
    """Config and origins, whose bytes are known as well."""
    format_version: int = field(default=FORMAT_VERSION)

    @property
    def step(self) -> int:
        """The iteration after which it was saved; its folder is named by it."""
        return int(self.progress["iteration"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the logical tensors."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def saved_from(self) -> str:
        """The layout in words."""
        return " x ".join(f"{axis} {size}" for axis, size in self.layout.items())

    @cached_property
    def stored(self) -> dict[tuple[str, str], Boxes[StoredBox]]:
        """The boxes of each (tensor, state)."""
        found: dict[tuple[str, str], list[StoredBox]] = {}
        for box in self.boxes:
            found.setdefault((box.tensor, box.state), []).append(box)
        return {key: Boxes(boxes) for key, boxes in found.items()}

    @property
    def states(self) -> tuple[str, ...]:
        """The states that it holds, `STATES` or `WEIGHT`."""
        return tuple(dict.fromkeys(box.state for box in self.boxes))

    @property
    def weight_state(self) -> str:
        """The state that weights are read from."""
        return WEIGHT if WEIGHT in self.states else STATES[0]

    def write(self, folder: Path) -> None:
        """Write it as JSON, a line a box."""
        head = {
            "format_version": self.format_version,
            "checksum": "0" * 32,
            "progress": self.progress,
            "scalars": self.scalars,
            "layout": self.layout,
            "model": self.model,
            "tensors": {
                name: {
                    "dtype": self.dtype,
                    **asdict(tensor),
                    "fingerprints": {
                        state: f"{self.fingerprints[name, state]:016x}"
                        for state in self.states
                        if (name, state) in self.fingerprints
                    },
                }
                for name, tensor in self.tensors.items()
            },
            "files": {name: asdict(file) for name, file in self.files.items()},
            "texts": {name: asdict(file) for name, file in self.texts.items()},
        }
        boxes = ",\n".join(json.dumps(_box_to_json(box)) for box in self.boxes)
        text = json.dumps(head, indent=1)[:-2] + f',\n "boxes": [\n{boxes}\n]\n}}\n'
        (folder / FILE_NAME).write_bytes(_with_checksum(text.encode()))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read it; CheckpointError where it is missing, damaged or of a newer format."""
        path = folder / FILE_NAME
        try:
            text = path.read_bytes()
            raw = json.loads(text)
            version = raw["format_version"]
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{path}: format version {version} is newer than {FORMAT_VERSION}, which this "
                    "program reads; use a newer megatron_lite"
                )
            if "checksum" in raw and _with_checksum(text) != text:
                raise ValueError("its checksum is another: it is not what was written")
            manifest = cls(
                progress=raw["progress"],
                scalars=raw["scalars"],
                layout=raw["layout"],
                model=raw["model"],
                tensors={name: _tensor_from_json(t) for name, t in raw["tensors"].items()},
                boxes=[_box_from_json(box) for box in raw["boxes"]],
                files={name: StoredFile(**file) for name, file in raw["files"].items()},
                texts={name: StoredFile(**file) for name, file in raw.get("texts", {}).items()},
                dtype=_dtype(raw["tensors"]),
                fingerprints={
                    (name, state): int(value, 16)
                    for name, tensor in raw["tensors"].items()
                    for state, value in tensor.get("fingerprints", {}).items()
                },
                format_version=version,
            )
            for fault in manifest._faults():
                raise ValueError(fault)
            return manifest
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; the checkpoint is not whole") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged ({error})") from error

    def _faults(self) -> Iterator[str]:
        """What makes no sense in it, whatever the files hold."""
        numbers = [self.progress["iteration"], self.progress["consumed_samples"]]
        numbers += [self.model["num_layers"], *self.layout.values()]
        if not all(isinstance(number, int) for number in numbers):
            yield "progress, model or layout holds what is no whole number"
        for name in {**self.files, **self.texts}:
            if Path(name).name != name:
                yield f"the name of file {name!r} leads elsewhere"
        for stored in self.boxes:
            shape = self.tensors[stored.tensor].shape
            if not len(stored.box.offset) == len(stored.box.size) == len(shape):
                yield f"a box of {stored.tensor} has not the dimensions of its shape {shape}"
            if stored.file not in self.files:
                yield f"{stored.tensor} lies in {stored.file}, which is not in the list of files"


def _with_checksum(text: bytes) -> bytes:
    """The text with the checksum that it must have, taken of it with zeros in that place."""
    bare = _CHECKSUM.sub(_NO_CHECKSUM, text, count=1)
    digest = xxhash.xxh3_128_hexdigest(bare).encode()
    return bare.replace(_NO_CHECKSUM, b'"checksum": "' + digest + b'"', 1)


def _dtype(tensors: dict[str, dict[str, Any]]) -> str:
    found = {tensor["dtype"] for tensor in tensors.values()}
    if len(found) > 1 or not found <= CODES.keys():
        raise ValueError(f"dtypes {sorted(found)}: one of {', '.join(CODES)} for all is readable")
    return found.pop() if found else "float32"


def _tensor_from_json(raw: dict[str, Any]) -> LogicalTensor:
    cut = None if raw["cut"] is None else Cut(**raw["cut"])
    return LogicalTensor(tuple(raw["shape"]), cut)


def _box_to_json(stored: StoredBox) -> dict[str, Any]:
    flat = asdict(stored)
    return {**{k: v for k, v in flat.items() if k != "box"}, **flat["box"]}


def _box_from_json(raw: dict[str, Any]) -> StoredBox:
    box = Box(tuple(raw.pop("offset")), tuple(raw.pop("size")))
    return StoredBox(box=box, **raw)
