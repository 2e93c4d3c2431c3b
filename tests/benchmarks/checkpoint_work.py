"""States of a model without a model: saved and loaded by our code, or trained a step by DeepSpeed.

`python checkpoint_work.py FOLDER NAME` writes DeepSpeed's own checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.checkpoint.load import load_fragments
from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.checkpoint.save import Snapshot
from megatron_lite.checkpoint.save import save as write
from megatron_lite.mpu.grid import Grid
from megatron_lite.sharding.placement import Placement, replicated, sharded, stacked


@dataclass(frozen=True)
class Model:
    """A LLaMA's sizes."""

    name: str
    layers: int
    hidden: int
    ffn: int
    vocabulary: int

    def placements(self) -> list[Placement]:
        """What a single rank would hold, fused as the layers fuse it."""

        def cut(name: str, shape: tuple[int, ...], dim: int) -> Placement:
            return sharded(name, shape, dim=dim, rank=0, size=1)

        h, f = self.hidden, self.ffn
        found = [
            cut("embedding.word_embeddings.weight", (self.vocabulary, h), 0),
            cut("output_layer.weight", (self.vocabulary, h), 0),
            replicated("final_norm.weight", (h,), rank=0),
        ]
        for n in range(self.layers):
            name = f"layers.{n}"
            parts = [cut(f"{name}.attention.{x}.weight", (h, h), 0) for x in ("query", "key")]
            parts.append(cut(f"{name}.attention.value.weight", (h, h), 0))
            gates = [cut(f"{name}.mlp.{x}.weight", (f, h), 0) for x in ("gate", "up")]
            norms = [f"{name}.input_norm.weight", f"{name}.post_attention_norm.weight"]
            found += [stacked(*parts), stacked(*gates)]
            found.append(cut(f"{name}.attention.output.weight", (h, h), 1))
            found.append(cut(f"{name}.mlp.down.weight", (h, f), 1))
            found += [replicated(norm, (h,), rank=0) for norm in norms]
        return found


FULL = Model("full", layers=24, hidden=1024, ffn=2560, vocabulary=32768)
QUICK = Model("quick", layers=4, hidden=64, ffn=128, vocabulary=512)
MODELS = {model.name: model for model in (FULL, QUICK)}


def fragments(model: Model) -> list[Fragment]:
    """Random states of all parameters."""
    torch.manual_seed(0)
    made = []
    for placement in model.placements():
        count = torch.Size(placement.shape).numel()
        made.append(Fragment(placement, 0, {state: torch.randn(count) for state in STATES}))
    return made


def save(root: Path, model: Model) -> float:
    """Seconds of a save."""
    snapshot = Snapshot(
        fragments=fragments(model),
        rng={"cpu": torch.get_rng_state()},
        progress={"iteration": 1, "consumed_samples": 8, "updates": 1, "skipped": 0, "nan": 0},
        scalars={"optimizer_step": 1, "loss_scaler": {}},
        grid=_alone(),
        config={"model": {"num_layers": model.layers}, "parallel": {}},
    )
    started = time.perf_counter()
    write(root, snapshot)
    return time.perf_counter() - started


def load(root: Path, model: Model) -> float:
    """Seconds of a load into states that are there."""
    into = fragments(model)
    folder = root / "global_step1"
    started = time.perf_counter()
    load_fragments(folder, Manifest.read(folder), into)
    return time.perf_counter() - started


def _alone() -> Grid:
    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return Grid(tp_size=1, dp_size=1, pp_size=1, rank=0)


def train_with_deepspeed(root: Path, model: Model) -> None:
    """One ZeRO-1 step of a module with the same parameters, and DeepSpeed's own checkpoint."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index, placement in enumerate(model.placements()):
                setattr(self, f"p{index}", torch.nn.Parameter(torch.randn(placement.shape)))

        def forward(self) -> torch.Tensor:
            return torch.stack([p.sum() for p in self.parameters()]).sum()

    _alone()
    holder = Holder()
    engine, *_ = deepspeed.initialize(
        model=holder,
        optimizer=torch.optim.AdamW(holder.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
        },
    )
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(str(root))


if __name__ == "__main__":
    train_with_deepspeed(Path(sys.argv[1]), MODELS[sys.argv[2]])
