"""A program that saves one step after the other until it is killed: `python -m … FOLDER`.

Step n holds the number n everywhere, so a mixture of two steps shows.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.checkpoint.manifest import STATES
from megatron_lite.checkpoint.save import Snapshot, save
from megatron_lite.mpu.grid import Grid
from megatron_lite.sharding.placement import replicated

ROWS, COLUMNS = 1000, 300


def main(root: Path) -> None:
    """Go on after the newest checkpoint, replacing that one first."""
    connection = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=connection, rank=0, world_size=1)
    store.recover(root)
    placements = [replicated(f"tensor{i}", (ROWS, COLUMNS), rank=0) for i in range(3)]
    print("ready", flush=True)
    for step in count((store.steps(root) or [1])[-1]):
        fragments = [
            Fragment(p, 0, {s: torch.full((ROWS * COLUMNS,), float(step)) for s in STATES})
            for p in placements
        ]
        snapshot = Snapshot(
            fragments=fragments,
            rng={"cpu": torch.get_rng_state()},
            progress={"iteration": step, "consumed_samples": step},
            scalars={},
            grid=Grid(tp_size=1, dp_size=1, pp_size=1, rank=0),
            config={"model": {"num_layers": 1}},
        )
        save(root, snapshot, keep_last=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
