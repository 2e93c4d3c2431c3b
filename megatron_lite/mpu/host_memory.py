"""How malloc keeps host memory. Called once, when a process starts; no part in what it computes."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3), from glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Let malloc serve large blocks again from what was freed; False where libc has no mallopt.

    By itself glibc maps every block above 32 MiB anew and returns it when it is freed, so logits
    and gradients are zeroed by the kernel page by page, in every step again.
    """
    return _mallopt(_M_MMAP_MAX, 0) and _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def share_one_arena() -> bool:
    """Let all threads take small blocks from one place; False where libc has no mallopt.

    By itself glibc reserves 64 MiB of addresses or more for each thread, which few of a tool's
    need: where addresses are limited (ulimit -v) they would run out.
    """
    return _mallopt(_M_ARENA_MAX, 1)


def _mallopt(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except AttributeError:
        return False
