"""Read a checkpoint that DeepSpeed's engine.save_checkpoint wrote with ZeRO stage 1 or 2.

Each data-parallel rank's file holds a flat stretch of every parameter group, and says which
parameter lies where in it (`param_slice_mappings`, deepspeed/runtime/zero/stage_1_and_2.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
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
    refuse,
    understood,
)
from megatron_lite.convert.hugging_face import parameter_shapes, parts_of
from megatron_lite.convert.target import Target
from megatron_lite.engine.interface import SCALER_STATE
from megatron_lite.progress import Progress

MODEL_FILE = "mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class _Fragment:
    """A stretch of a parameter: `numel` numbers from `start` on in a rank's flat states."""

    flat: Mapping[str, Tensor]
    start: int
    numel: int


def read(root: Path, target: Target, *, step: int | None = None) -> Foreign:
    """The checkpoint of `step`, or the one that `latest` names, under our names.

    CheckpointError where it is not whole, of another kind, or not of the config's model.
    """
    folder = find(root, step)
    with understood(folder, "DeepSpeed lays out ZeRO 1 and 2"):
        return _read(folder, target)


def _read(folder: Path, target: Target) -> Foreign:
    facts = torch_files.load(folder / MODEL_FILE)
    ranks = [_rank_file(path) for path in _rank_paths(folder, facts)]
    shapes = _shapes(folder, facts)
    parts = parts_of(target.model, target.table)
    check_shapes(folder, shapes, parameter_shapes(parts, target.table))
    fragments = _fragments(folder, ranks, shapes)

    def read_one(tensor: str, state: str) -> Tensor:
        part = parts[tensor]
        pieces = [f.flat[state][f.start : f.start + f.numel] for f in fragments[part.parameter]]
        whole = torch.cat(pieces).view(shapes[part.parameter])
        return part.take(whole, target.table[tensor].shape[0])

    return Foreign(
        folder,
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
    pointer = root / "latest"
    if not pointer.is_file():
        raise CheckpointError(f"{pointer}: missing; name a step with --step")
    return existing(root / pointer.read_text().strip())


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
    bf16 = (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").is_file()
    prefix = "bf16_" if bf16 else ""
    names = [f"{prefix}zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(count)]
    missing = [name for name in names if not (folder / name).is_file()]
    refuse(f"{folder}: files are missing, of {count} ranks", missing)
    return [folder / name for name in names]


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


def _shapes(folder: Path, facts: Mapping[str, Any]) -> Shapes:
    """Shape of every trained parameter; a tied one is there once."""
    groups = facts.get("param_shapes")
    if not groups:
        raise CheckpointError(f"{folder / MODEL_FILE}: has no param_shapes; not of a ZeRO run")
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _fragments(
    folder: Path, ranks: list[Mapping[str, Any]], shapes: Shapes
) -> dict[str, list[_Fragment]]:
    """The stretches of each parameter in the order of the ranks, which is theirs in it."""
    found: dict[str, list[_Fragment]] = {name: [] for name in shapes}
    faults = []
    for rank in ranks:
        for number, slices in enumerate(rank["param_slice_mappings"]):
            flat = _flat_states(rank, number)
            length = min(values.numel() for values in flat.values())
            for name, address in slices.items():
                found.setdefault(name, []).append(_Fragment(flat, address.start, address.numel))
                if address.start + address.numel > length:
                    faults.append(f"{rank['path'].name}: {name} ends beyond {length} numbers")
    for name, fragments in found.items():
        there, wanted = sum(f.numel for f in fragments), prod(shapes.get(name, ()))
        if there != wanted:
            faults.append(f"{name}: the ranks' files hold {there} of its {wanted} numbers")
    refuse(f"{folder}: tensors are not whole", faults)
    return found


def _flat_states(rank: Mapping[str, Any], group: int) -> dict[str, Tensor]:
    """A rank's flat master weights and moments of one parameter group."""
    moments = rank["base_optimizer_state"]["state"].get(group, {})
    lacking = [state for state in STATES[1:] if state not in moments]
    if lacking:
        raise CheckpointError(
            f"{rank['path']}: group {group} has no {', '.join(lacking)}; only Adam's states are "
            "converted, of a run that has made a step"
        )
    fp32 = rank["single_partition_of_fp32_groups"][group]
    return {STATES[0]: fp32, **{state: moments[state] for state in STATES[1:]}}


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
