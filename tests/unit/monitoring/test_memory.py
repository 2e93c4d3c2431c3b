"""Peak memory: a real size on a CPU, and per period on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megatron_lite
from megatron_lite.monitoring.memory import peak_memory_bytes


def test_b55_cpu_peak_is_a_resident_size_that_grows_with_use() -> None:
    program = (
        "from megatron_lite.monitoring.memory import peak_memory_bytes as peak\n"
        "before = peak('cpu')\n"
        "block = bytearray(b'x') * (64 * 2**20)\n"
        "del block\n"
        "print(before, peak('cpu'))\n"
    )
    root = Path(megatron_lite.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert 2**20 < before < 2**30
    assert 60 * 2**20 <= after - before <= 80 * 2**20


def test_cuda_peak_is_that_since_the_previous_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    peaks = {"now": 0}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.update(now=10))
    peaks["now"] = 500
    assert peak_memory_bytes("cuda") == 500
    assert peak_memory_bytes("cuda") == 10
