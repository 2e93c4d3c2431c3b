"""The manifest of a checkpoint: what it holds and which file holds which box.

A person can read it, and so can any program that reads JSON and safetensors.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.sharding.placement import Box, Cut
from megatron_lite.sharding.plan import LogicalTensor

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Of a checkpoint to train on: master weights and Adam's two moments, each of them float32."""
WEIGHT = "weight"
"""The one state of a checkpoint of weights alone; its dtype is the manifest's."""
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""What safetensors calls a dtype."""


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
    """Sizes of the axes that it was saved from, and the ZeRO stage."""
    model: dict[str, Any]
    """The model section of the config."""
    tensors: dict[str, LogicalTensor]
    """Every logical tensor: its shape, and how tensor parallelism cuts it on any layout."""
    boxes: list[StoredBox]
    files: dict[str, StoredFile]
    dtype: str = "float32"
    """Of all logical tensors."""
    fingerprints: dict[tuple[str, str], int] = field(default_factory=dict)
    """Of each (tensor, state), taken from memory when it was saved; empty if it was not."""
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
    def stored(self) -> dict[tuple[str, str], list[StoredBox]]:
        """The boxes of each (tensor, state)."""
        found: dict[tuple[str, str], list[StoredBox]] = {}
        for box in self.boxes:
            found.setdefault((box.tensor, box.state), []).append(box)
        return found

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
        }
        boxes = ",\n".join(json.dumps(_box_to_json(box)) for box in self.boxes)
        text = json.dumps(head, indent=1)[:-2] + f',\n "boxes": [\n{boxes}\n]\n}}\n'
        (folder / FILE_NAME).write_text(text)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read it; CheckpointError where it is missing, damaged or of a newer format."""
        path = folder / FILE_NAME
        try:
            raw = json.loads(path.read_text())
            version = raw["format_version"]
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{path}: format version {version} is newer than {FORMAT_VERSION}, which this "
                    "program reads; use a newer megatron_lite"
                )
            return cls(
                progress=raw["progress"],
                scalars=raw["scalars"],
                layout=raw["layout"],
                model=raw["model"],
                tensors={name: _tensor_from_json(t) for name, t in raw["tensors"].items()},
                boxes=[_box_from_json(box) for box in raw["boxes"]],
                files={name: StoredFile(**file) for name, file in raw["files"].items()},
                dtype=next((t["dtype"] for t in raw["tensors"].values()), "float32"),
                fingerprints={
                    (name, state): int(value, 16)
                    for name, tensor in raw["tensors"].items()
                    for state, value in tensor.get("fingerprints", {}).items()
                },
                format_version=version,
            )
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing; the checkpoint is not whole") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged ({error})") from error


def _tensor_from_json(raw: dict[str, Any]) -> LogicalTensor:
    cut = None if raw["cut"] is None else Cut(**raw["cut"])
    return LogicalTensor(tuple(raw["shape"]), cut)


def _box_to_json(stored: StoredBox) -> dict[str, Any]:
    flat = asdict(stored)
    return {**{k: v for k, v in flat.items() if k != "box"}, **flat["box"]}


def _box_from_json(raw: dict[str, Any]) -> StoredBox:
    box = Box(tuple(raw.pop("offset")), tuple(raw.pop("size")))
    return StoredBox(box=box, **raw)
