"""Checkpoint folders as DeepSpeed writes them with ZeRO 1 and 2, made by hand."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from deepspeed.utils.tensor_fragment import fragment_address

from megatron_lite.convert.hugging_face import parameter_shapes, parts_of
from megatron_lite.convert.target import Target

MODEL = "mp_rank_00_model_states.pt"
RANKS = 2


def optimizer_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write(root: Path, target: Target) -> Path:
    """Write `<root>/global_step7` and `latest`: each rank has half of the numbers, which count up
    from 0."""
    shapes = parameter_shapes(parts_of(target.model, target.table), target.table)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    half = -(-total // RANKS)
    folder = root / "global_step7"
    folder.mkdir(parents=True)
    (root / "latest").write_text("global_step7")
    model = {
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items())],
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "global_steps": 7,
        "global_samples": 28,
        "skipped_steps": 1,
    }
    torch.save(model, folder / MODEL)
    for rank in range(RANKS):
        slices, at = OrderedDict(), 0
        for name, shape in shapes.items():
            low = max(at, rank * half)
            high = min(at + torch.Size(shape).numel(), (rank + 1) * half)
            if low < high:
                slices[name] = fragment_address(start=low - rank * half, numel=high - low)
            at += torch.Size(shape).numel()
        flat = torch.arange(rank * half, (rank + 1) * half, dtype=torch.float32)
        moments = {"step": torch.tensor(6.0), "exp_avg": flat + 0.25, "exp_avg_sq": flat + 0.5}
        optimizer = {
            "base_optimizer_state": {"state": {0: moments}, "param_groups": [{"params": [0]}]},
            "single_partition_of_fp32_groups": [flat],
            "param_slice_mappings": [slices],
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / optimizer_file(rank))
    return folder
