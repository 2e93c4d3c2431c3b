"""Peak memory of this process, for the log.

One rank's own number; the trainer takes the maximum over ranks, since the peak of a pipeline is
seldom on the rank that logs.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Literal


def peak_memory_bytes(device: Literal["cuda", "cpu"]) -> int:
    """Peak memory in bytes, never 0.

    cuda: the most that torch had allocated on the current device since the previous call (this
    call starts the next period). cpu: the largest resident size since the process started, as the
    kernel counts it; it never falls.
    """
    return _cuda_peak() if device == "cuda" else _resident_peak()


def _cuda_peak() -> int:
    import torch

    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def _resident_peak() -> int:
    # Linux keeps ru_maxrss across exec, so a child of a large launcher would report the launcher's
    # size; VmHWM belongs to the program itself. Some sandboxes leave it out.
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
