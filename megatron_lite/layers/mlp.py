"""The feed-forward block: GELU (tanh approximation) or SwiGLU (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_lite.config.schema import ModelConfig
from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.linear import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """hidden [t, h] → [t, h] by way of f / size channels a rank; gate and up are one product."""

    def __init__(
        self, model: ModelConfig, context: LayerContext, name: str, *, output_init: Init
    ) -> None:
        super().__init__()
        parts = ("gate", "up") if model.swiglu else ("up",)
        self.swiglu = model.swiglu
        self.up = ColumnParallelLinear(
            context,
            {f"{name}.{part}": model.ffn_hidden_size for part in parts},
            model.hidden_size,
            bias=model.add_bias_linear,
            init=Init(std=model.init_method_std),
        )
        self.down = RowParallelLinear(
            context,
            f"{name}.down",
            model.ffn_hidden_size,
            model.hidden_size,
            bias=model.add_bias_linear,
            init=output_init,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.up(hidden)
        if self.swiglu:
            gate, up = inner.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(inner, approximate="tanh"))
