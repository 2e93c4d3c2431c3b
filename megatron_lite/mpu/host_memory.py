"""Keeps freed host memory in the process, as torch does for a GPU's.

Called once at the start of a run on a CPU; it has no part in what the run computes.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3), from glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Let malloc serve large blocks again from what was freed; False where libc has no mallopt.

    By itself glibc maps every block above 32 MiB anew and returns it when it is freed, so logits
    and gradients are zeroed by the kernel page by page, in every step again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
