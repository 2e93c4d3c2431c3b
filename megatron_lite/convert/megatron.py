"""Read the weights of Megatron-LM's legacy checkpoints, of any tensor × pipeline size.

A file a (tensor, pipeline) rank, with that rank's shards. The optimizer's states, whose order
depends on the run's buffers, are not read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import WEIGHT
from megatron_lite.convert import megatron_facts, megatron_layout, torch_files
from megatron_lite.convert.foreign import Foreign, existing, pointed, refuse, understood
from megatron_lite.convert.megatron_stages import find_sources, make_stages
from megatron_lite.convert.target import Target
from megatron_lite.progress import Progress

POINTER = "latest_checkpointed_iteration.txt"
VERSION = 3.0
LAYOUT = "Megatron-LM lays out checkpoint version 3.0"


def read(root: Path, target: Target, *, step: int | None = None) -> Foreign:
    """The weights of iteration `step`, or of the one that the pointer file names.

    CheckpointError where the folder is not whole, of another kind, or not of the config's model.
    """
    folder = find(root, step)
    with understood(folder, LAYOUT):
        return _read(folder, target)


def _read(folder: Path, target: Target) -> Foreign:
    grid = _grid(folder)
    files = [[torch_files.load(path) for path in stage] for stage in grid]
    facts = _facts(grid[0][0], files[0][0], target)
    _check_groups(folder, len(grid[0]), target)
    sources = find_sources(folder, make_stages(grid, files), target)

    def read_one(tensor: str, state: str) -> Tensor:
        stage, name = sources[tensor]
        shards = [rank[name] for rank in stage.ranks]
        logical = target.table[tensor]
        return megatron_layout.merge(
            shards, tensor, logical, target.model, interleaved=facts.interleaved
        )

    position = Progress(
        iteration=facts.iteration, consumed_samples=facts.samples, updates=facts.iteration
    )
    scalars: dict[str, Any] = {"optimizer_step": 0, "loss_scaler": {}}
    return Foreign(folder, LAYOUT, position, scalars, (WEIGHT,), read_one, facts.notes)


def find(root: Path, step: int | None) -> Path:
    """`<root>/iter_<step>`, or what the pointer file names (a number, or `release`)."""
    word = pointed(root / POINTER) if step is None else str(step)
    return existing(root / (f"iter_{int(word):07d}" if word.isdecimal() else word))


def _grid(folder: Path) -> list[list[Path]]:
    """The files, by pipeline stage and tensor rank; every one that is missing is named."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    tp = next(t for t in count() if not names & {f"mp_rank_{t:02d}", f"mp_rank_{t:02d}_000"})
    if tp == 0:
        raise CheckpointError(f"{folder}: has no mp_rank_00; not a legacy Megatron checkpoint")
    if "mp_rank_00" in names:
        folders = [[f"mp_rank_{t:02d}" for t in range(tp)]]
    else:
        pp = next(p for p in count() if f"mp_rank_00_{p:03d}" not in names)
        folders = [[f"mp_rank_{t:02d}_{p:03d}" for t in range(tp)] for p in range(pp)]
    grid = [[folder / name / "model_optim_rng.pt" for name in stage] for stage in folders]
    missing = [str(path.relative_to(folder)) for stage in grid for path in stage]
    missing = [name for name in missing if not (folder / name).is_file()]
    refuse(f"{folder}: files are missing", missing)
    return grid


def _check_groups(folder: Path, tp: int, target: Target) -> None:
    """Whole key/value heads on every tensor rank; of copies on several ranks none could be read."""
    groups = target.model.num_query_groups
    if groups % tp:
        raise CheckpointError(
            f"{folder}: its {tp} tensor ranks can't share model.num_query_groups {groups} evenly; "
            "correct the config, or save it with a tensor size that divides them"
        )


@dataclass(frozen=True)
class _Facts:
    """What the first file says of the run."""

    iteration: int
    samples: int
    interleaved: bool
    """RoPE pairs neighbouring channels of a head."""
    notes: list[str]


def _facts(path: Path, content: Mapping[str, Any], target: Target) -> _Facts:
    version = content.get("checkpoint_version", 0)
    if version != VERSION:
        raise CheckpointError(
            f"{path}: checkpoint_version is {version}; only {VERSION} is read, since older ones "
            "order query, key and value differently. Load and save it with a newer Megatron-LM"
        )
    args = content.get("args")
    notes = ["only weights are converted; resume with checkpoint.finetune or no_load_optim"]
    if isinstance(args, Namespace):
        megatron_facts.check(path, args, target)
        if not target.model.swiglu and getattr(args, "bias_gelu_fusion", True) is False:
            notes.append("bias_gelu_fusion is off there: GELU was exact, here it is its tanh form")
    else:
        notes.append("the checkpoint keeps no arguments: heads, RoPE and epsilon are unchecked")
        args = Namespace()
    iteration = content.get("iteration")  # a released model has a word there, or nothing
    return _Facts(
        iteration if isinstance(iteration, int) else 0,
        int(getattr(args, "consumed_train_samples", 0) or 0),
        bool(getattr(args, "rotary_interleaved", False)),
        notes,
    )
