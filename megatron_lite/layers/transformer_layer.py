"""One pre-norm transformer layer: norm, attention, residual; norm, MLP, residual."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig
from megatron_lite.layers.attention import SelfAttention
from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.dropout import HiddenDropout
from megatron_lite.layers.mlp import MLP
from megatron_lite.layers.norm import Norm
from megatron_lite.layers.packing import UNPACKED, Packing


class TransformerLayer(nn.Module):
    """hidden [t, h] → [t, h]. `index` is the layer's number in the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        context: LayerContext,
        index: int,
        *,
        recompute_attention: bool = False,
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        # Each layer adds two outputs to the residual stream, which keeps its variance with this
        # (Radford et al. 2019, section 2.3).
        output_init = Init(std=model.init_method_std / (2 * model.num_layers) ** 0.5)
        self.input_norm = block_norm(model, context, f"{name}.input_norm")
        self.attention = SelfAttention(
            model,
            context,
            f"{name}.attention",
            output_init=output_init,
            recompute_core=recompute_attention,
        )
        self.post_attention_norm = block_norm(model, context, f"{name}.post_attention_norm")
        self.mlp = MLP(model, context, f"{name}.mlp", output_init=output_init)
        self.dropout = HiddenDropout(context, model.hidden_dropout)

    def forward(self, hidden: Tensor, batch: int, packing: Packing = UNPACKED) -> Tensor:
        attended = self.attention(self.input_norm(hidden), batch, packing)
        hidden = hidden + self.dropout(attended)
        return hidden + self.dropout(self.mlp(self.post_attention_norm(hidden)))


def block_norm(model: ModelConfig, context: LayerContext, name: str) -> Norm:
    """A norm of hidden states between the tensor-parallel regions."""
    return Norm(
        context,
        name,
        model.hidden_size,
        kind=model.normalization,
        epsilon=model.norm_epsilon,
        partial_grad=context.sequence_parallel,
    )
