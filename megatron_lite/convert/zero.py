"""Read a checkpoint that DeepSpeed's engine.save_checkpoint wrote with ZeRO stage 1 or 2.

Each data-parallel rank's file holds a flat stretch of every parameter group, and says which
parameter lies where in it (deepspeed/runtime/zero/stage_1_and_2.py; see zero_fragments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import STATES
from megatron_lite.convert import torch_files
from megatron_lite.convert.foreign import (
    Foreign,
    Shapes,
    check_shapes,
    existing,
    pointed,
    refuse,
    understood,
)
from megatron_lite.convert.hugging_face import parameter_shapes, parts_of
from megatron_lite.convert.target import Target
from megatron_lite.convert.zero_fragments import fragments
from megatron_lite.engine.interface import SCALER_STATE
from megatron_lite.progress import Progress

MODEL_FILE = "mp_rank_00_model_states.pt"
LAYOUT = "DeepSpeed lays out ZeRO 1 and 2"


def read(root: Path, target: Target, *, step: int | None = None) -> Foreign:
    """The checkpoint of `step`, or the one that `latest` names, under our names.

    CheckpointError where it is not whole, of another kind, or not of the config's model.
    """
    folder = find(root, step)
    with understood(folder, LAYOUT):
        return _read(folder, target)


def _read(folder: Path, target: Target) -> Foreign:
    facts = torch_files.load(folder / MODEL_FILE)
    ranks = [_rank_file(path) for path in _rank_paths(folder, facts)]
    groups = _groups(folder, facts)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    parts = parts_of(target.model, target.table)
    check_shapes(folder, shapes, parameter_shapes(parts, target.table))
    found = fragments(folder, ranks, groups)

    def read_one(tensor: str, state: str) -> Tensor:
        part = parts[tensor]
        pieces = [f.flat[state][f.start : f.start + f.numel] for f in found[part.parameter]]
        whole = torch.cat(pieces).view(shapes[part.parameter])
        return part.take(whole, target.table[tensor].shape[0])

    return Foreign(
        folder,
        LAYOUT,
        _position(facts),
        {"optimizer_step": _optimizer_step(folder, ranks), "loss_scaler": _scaler(ranks[0])},
        STATES,
        read_one,
        [f"{folder} says shapes only: heads, RoPE base and norm epsilon are the config's"],
    )


def find(root: Path, step: int | None) -> Path:
    """`<root>/global_step<step>`, or what `latest` names."""
    if step is not None:
        return existing(root / f"global_step{step}")
    return existing(root / pointed(root / "latest"))


def _rank_paths(folder: Path, facts: Mapping[str, Any]) -> list[Path]:
    """The optimizer file of every data-parallel rank; all that are missing are named."""
    if facts.get("mp_world_size", 1) != 1:
        raise CheckpointError(
            f"{folder}: was saved with model parallel size {facts['mp_world_size']}; only data "
            "parallel checkpoints (ZeRO 1 and 2, any number of ranks) are read"
        )
    count = facts.get("dp_world_size")
    if not isinstance(count, int):
        raise CheckpointError(f"{folder / MODEL_FILE}: has no dp_world_size; not DeepSpeed's")
    kinds = [prefix for prefix in ("", "bf16_") if (folder / _file(prefix, 0)).is_file()]
    if len(kinds) > 1:
        raise CheckpointError(
            f"{folder}: holds both {' and '.join(_file(kind, 0) for kind in kinds)}; remove the "
            "files of the run that is not wanted"
        )
    names = [_file(kinds[0] if kinds else "", rank) for rank in range(count)]
    missing = [name for name in names if not (folder / name).is_file()]
    refuse(f"{folder}: files are missing, of {count} ranks", missing)
    return [folder / name for name in names]


def _file(prefix: str, rank: int) -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _rank_file(path: Path) -> Mapping[str, Any]:
    """A rank's optimizer part; CheckpointError where it is not of ZeRO 1 or 2 with Adam."""
    found = torch_files.load(path).get("optimizer_state_dict", {})
    wanted = ("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings")
    lacking = [key for key in wanted if key not in found]
    if lacking:
        raise CheckpointError(
            f"{path}: has no {', '.join(lacking)}: it is not of ZeRO stage 1 or 2. Of stage 3, "
            "load it with DeepSpeed and save it at stage 2"
        )
    if not isinstance(found["base_optimizer_state"], dict):
        raise CheckpointError(
            f"{path}: was saved with zero_optimization.elastic_checkpoint, which is not read"
        )
    if any(any(group) for group in found.get("param_alignment_paddings", ())):
        raise CheckpointError(
            f"{path}: was saved with zero_optimization.parameter_alignment, which is not read"
        )
    return {**found, "path": path}


def _groups(folder: Path, facts: Mapping[str, Any]) -> list[Shapes]:
    """Shape of every trained parameter, by parameter group; a tied one is there once."""
    groups = facts.get("param_shapes")
    if not groups:
        raise CheckpointError(f"{folder / MODEL_FILE}: has no param_shapes; not of a ZeRO run")
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _optimizer_step(folder: Path, ranks: list[Mapping[str, Any]]) -> int:
    """Adam's number of updates, which all ranks and groups agree on."""
    steps = set()
    for rank in ranks:
        base = rank["base_optimizer_state"]
        for number, group in enumerate(base["param_groups"]):
            steps.add(int(base["state"].get(number, {}).get("step", group.get("step", 0))))
    if len(steps) != 1:
        raise CheckpointError(f"{folder}: its ranks disagree on the optimizer step: {steps}")
    return steps.pop()


def _scaler(rank: Mapping[str, Any]) -> dict[str, Any]:
    """The loss scaler's counters."""
    attributes = vars(rank.get("loss_scaler", torch_files.StandIn()))
    return {name: attributes[name] for name in SCALER_STATE if name in attributes}


def _position(facts: Mapping[str, Any]) -> Progress:
    """DeepSpeed counts skipped steps among its steps, as we do."""
    steps, skipped = facts["global_steps"], facts.get("skipped_steps", 0)
    return Progress(
        iteration=steps,
        consumed_samples=facts.get("global_samples", 0),
        updates=steps - skipped,
        skipped=skipped,
    )
