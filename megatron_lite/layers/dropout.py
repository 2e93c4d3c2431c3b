"""Dropout of hidden states from the stream that fits their layout."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_lite.layers.context import LayerContext
from megatron_lite.mpu.random import REPLICATED, SHARDED


class HiddenDropout(nn.Module):
    """Drops elements of [t, h] alike on all tensor-parallel ranks; under sequence parallelism,
    where each rank holds its own tokens, from the rank's own stream."""

    def __init__(self, context: LayerContext, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.stream = SHARDED if context.sequence_parallel else REPLICATED
        self.streams = context.streams

    def forward(self, hidden: Tensor) -> Tensor:
        if not (self.training and self.probability):
            return hidden
        with self.streams.use(self.stream):
            return F.dropout(hidden, self.probability)
