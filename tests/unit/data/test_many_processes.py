"""Processes that start at once: no index is built, so that none waits for another's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_lite.data.indexed_dataset import IndexedDataset

REPOSITORY = Path(__file__).resolve().parents[3]
READ = """
import hashlib, sys
from megatron_lite.data.blended import BlendedDataset
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed_dataset import IndexedDataset
weights, prefixes = [0.7, 0.3], sys.argv[1:]
sources = [GPTDataset(IndexedDataset(p), seq_length=64, seed=5) for p in prefixes]
dataset = BlendedDataset(sources, weights)
print(hashlib.sha256(b"".join(dataset[k].tobytes() for k in range(300))).hexdigest())
"""


def _all_ranks(prefixes: list[str]) -> list[str]:
    """What four processes read that start at the same time."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ, *prefixes]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        read = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4
    return read


def test_b14_nothing_is_built_or_kept(
    write_documents: Callable[..., IndexedDataset],
    tmp_path: Path,
) -> None:
    """Equal samples on all ranks, no file beside the data, and none that outlives a rewrite."""
    rng = np.random.default_rng(0)

    def write() -> list[str]:
        return [
            write_documents(
                [rng.integers(0, 90, length) for length in rng.integers(1, 200, 400)], name=name
            ).prefix
            for name in ("x", "y")
        ]

    first = _all_ranks(write())
    assert len(set(first)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx", "y.bin", "y.idx"]
    second = _all_ranks(write())
    assert len(set(second)) == 1 and second != first
