"""Activation recomputation that draws the same random numbers the second time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_lite.mpu.random import RngStreams


def recompute(function: Callable[..., Tensor], *args: Any, streams: RngStreams) -> Tensor:
    """`function(*args)` that keeps its inputs only and runs again in the backward (Chen et al.,
    arXiv:1604.06174); every random stream is put back for the second run."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), streams.replay(streams.states())

    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
