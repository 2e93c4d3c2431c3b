"""LayerNorm and RMSNorm over the last dimension, with parameters whole on every rank."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.kernels import norm_function
from megatron_lite.sharding.placement import replicated


class Norm(nn.Module):
    """`kind` "LayerNorm" (weight and bias) or "RMSNorm" (weight); x […, width] → […, width].

    `partial_grad`: each tensor-parallel rank normalises different elements (its tokens under
    sequence parallelism, its heads in query and key norms), so the gradients are summed.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        width: int,
        *,
        kind: str,
        epsilon: float,
        partial_grad: bool,
    ) -> None:
        super().__init__()
        self.shape, self.epsilon = (width,), epsilon
        self.function = norm_function(kind, context.device)
        rank = context.group.rank
        weight = replicated(f"{name}.weight", self.shape, rank=rank)
        self.weight = context.parameter(weight, Init(mean=1.0), partial_grad=partial_grad)
        self.bias = None
        if kind == "LayerNorm":
            bias = replicated(f"{name}.bias", self.shape, rank=rank)
            self.bias = context.parameter(bias, Init(), partial_grad=partial_grad)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.shape, self.weight, self.bias, self.epsilon)
