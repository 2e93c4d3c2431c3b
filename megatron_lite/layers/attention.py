"""Causal self-attention with grouped key/value heads, cut over the tensor group by heads.

t = b · s tokens, n query heads and g key/value groups of d channels each, on all ranks together.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_lite.config.schema import ModelConfig
from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_lite.layers.norm import Norm
from megatron_lite.layers.packing import UNPACKED, Packing
from megatron_lite.layers.recompute import recompute
from megatron_lite.layers.rotary import apply_rotary, rotary_tables
from megatron_lite.mpu.random import SHARDED


class SelfAttention(nn.Module):
    """hidden [t, h] → [t, h]; under sequence parallelism each rank holds t / size of the tokens."""

    def __init__(
        self,
        model: ModelConfig,
        context: LayerContext,
        name: str,
        *,
        output_init: Init,
        recompute_core: bool,
    ) -> None:
        super().__init__()
        self.channels = model.kv_channels
        self.heads = model.num_attention_heads // context.group.size
        self.groups = model.num_query_groups // context.group.size
        self.dropout = model.attention_dropout
        self.recompute_core = recompute_core
        self.streams = context.streams
        query, key_value = (
            n * self.channels for n in (model.num_attention_heads, model.num_query_groups)
        )
        self.query_key_value = ColumnParallelLinear(
            context,
            {f"{name}.query": query, f"{name}.key": key_value, f"{name}.value": key_value},
            model.hidden_size,
            bias=model.add_qkv_bias,
            init=Init(std=model.init_method_std),
        )
        self.output = RowParallelLinear(
            context,
            f"{name}.output",
            query,
            model.hidden_size,
            bias=model.add_bias_linear,
            init=output_init,
        )
        self.query_norm = self.key_norm = None
        if model.qk_layernorm:
            self.query_norm = self._head_norm(model, context, f"{name}.query_norm")
            self.key_norm = self._head_norm(model, context, f"{name}.key_norm")
        self.rotary = None
        if model.position_embedding_type == "rope":
            rotary_dim = int(self.channels * model.rotary_percent)
            self.rotary = rotary_tables(
                model.seq_length, rotary_dim, base=model.rotary_base, device=context.device
            )

    def _head_norm(self, model: ModelConfig, context: LayerContext, name: str) -> Norm:
        return Norm(
            context,
            name,
            self.channels,
            kind=model.normalization,
            epsilon=model.norm_epsilon,
            partial_grad=True,
        )

    def forward(self, hidden: Tensor, batch: int, packing: Packing = UNPACKED) -> Tensor:
        fused = self.query_key_value(hidden)
        if self.recompute_core and torch.is_grad_enabled():
            context = recompute(self._core, fused, batch, packing, streams=self.streams)
        else:
            context = self._core(fused, batch, packing)
        return self.output(context)

    def _core(self, fused: Tensor, batch: int, packing: Packing) -> Tensor:
        """[t, (n + 2g) d / size] → [t, n d / size]: everything between the two linear layers."""
        heads, groups, d = self.heads, self.groups, self.channels
        fused = fused.view(batch, -1, heads + 2 * groups, d)
        query, key, value = fused.split((heads, groups, groups), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            rows = slice(fused.shape[1]) if packing.positions is None else packing.positions
            cos, sin = (table[rows] for table in self.rotary)
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = self._attend(query, key, value, packing.mask)
        # SDPA lays its result out as [b, s, n, d], so this is a view.
        return out.transpose(1, 2).reshape(-1, heads * d)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        grouped = self.heads != self.groups
        if mask is not None and grouped:
            # The fused CUDA kernel that takes a mask knows no groups; the fallback would store all
            # scores.
            key, value = (x.repeat_interleave(self.heads // self.groups, 1) for x in (key, value))
            grouped = False
        attend = partial(
            F.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=grouped,
        )
        if not (self.training and self.dropout):
            return attend()
        with self.streams.use(SHARDED):
            return attend(dropout_p=self.dropout)
