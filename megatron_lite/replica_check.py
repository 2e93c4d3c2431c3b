"""Do all ranks that hold copies of working weights hold the same bits? Asked every N steps.

Copies are all of a data-parallel replica's weights on the others (under ZeRO-3 each rank has a part
of its own), norms and other unsharded parameters on all tensor ranks, and the two tables of a tied
embedding. Only hashes travel. Called by the trainer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.engine.interface import Engine, Working
from megatron_lite.layers.context import placement_of
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.random import derive_seed
from megatron_lite.mpu.reductions import largest
from megatron_lite.numerics.replicas import Drift, content_hash, drift

_TOLD = 5
"""Tensors that are named one by one."""


def replica_faults(engine: Engine, grid: Grid, device: torch.device, *, node: str) -> list[str]:
    """A line for each of the first tensors of which holders differ; empty where all agree.

    `node` is what people call this machine. Collective; the same on all ranks.
    """
    names, own = _own_hashes(engine, grid, device)
    hashes = _everyones(own, device)
    differing = {key for key, held in hashes.items() if len(set(held.values())) > 1}
    if not differing:
        return []
    everyones: list[Any] = [None] * grid.world_size
    told = {key: name for key, name in names.items() if key in differing}
    dist.all_gather_object(everyones, (node, told))
    nodes = {rank: node for rank, (node, _) in enumerate(everyones)}
    known = {key: name for _, named in everyones for key, name in named.items()}
    found = [drift(known[key], hashes[key]) for key in known]
    lines = [one.describe(nodes) for one in found if isinstance(one, Drift)]
    rest = len(lines) - _TOLD
    return [*lines[:_TOLD], *([f"and {rest} more tensors"] if rest > 0 else [])]


def _own_hashes(engine: Engine, grid: Grid, device: torch.device) -> tuple[dict[int, str], Tensor]:
    """Names by key, and (key, hash) of each parameter, int64 [n, 2]. Equal keys: equal bits."""
    names, pairs = {}, []
    for working in engine.working():
        name = ", ".join(placement_of(working.parameter).names)
        if not name:
            continue  # a shard that is padding only
        key = _key(name, working, grid)
        names[key] = name
        pairs.append(
            torch.stack([torch.tensor(key, device=device), content_hash(working.values).to(device)])
        )
    return names, torch.stack(pairs) if pairs else torch.zeros((0, 2), dtype=torch.int64)


def _key(name: str, working: Working, grid: Grid) -> int:
    """What copies have in common: the tensor, its tensor-parallel shard, its ZeRO-3 part."""
    sharded = placement_of(working.parameter).tensor_sharded
    shard = grid.tp_rank if sharded else -1
    return derive_seed("replica", name, shard, -1 if working.part is None else working.part)


def _everyones(own: Tensor, device: torch.device) -> dict[int, dict[int, int]]:
    """Hash by key and rank. Ranks have different numbers of parameters: the rest is empty rows."""
    count, _ = largest(len(own), device)
    padded = torch.full((count, 2), -1, dtype=torch.int64, device=device)
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    found: dict[int, dict[int, int]] = {}
    for rank, pairs in enumerate(gathered):
        for key, value in pairs.tolist():
            if key >= 0:  # derive_seed gives no negative number
                found.setdefault(key, {})[rank] = value
    return found
