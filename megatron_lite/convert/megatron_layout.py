"""How Megatron-LM lays logical tensors out in the shards of its tensor-parallel ranks.

Of each rank, query, key and value are one matrix, group by group [g, (n/g + 2) d, h], and SwiGLU's
gate and up are one, [gate; up]; the vocabulary is padded. n heads in g groups of d channels, all of
one rank (megatron/core/transformer/attention.py, get_query_key_value_tensors). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.config.schema import ModelConfig
from megatron_lite.sharding.plan import LogicalTensor

_ROTATED = ("query", "key", "query_norm", "key_norm")
"""What has an entry for each channel that RoPE turns; a norm has one head's, for all of them."""


def merge(
    shards: Sequence[Tensor],
    tensor: str,
    logical: LogicalTensor,
    model: ModelConfig,
    *,
    interleaved: bool,
) -> Tensor:
    """A logical tensor from the ranks' shards of the parameter that holds it."""
    own = [_extract(shard, tensor, model, len(shards)) for shard in shards]
    whole = own[0] if logical.cut is None else torch.cat(own, dim=logical.cut.dim)
    if whole.shape[0] > logical.shape[0]:
        whole = whole[: logical.shape[0]]  # the padding of a vocabulary
    if interleaved and tensor.split(".")[-2] in _ROTATED:
        whole = halves(whole, model)
    return whole


def _extract(shard: Tensor, tensor: str, model: ModelConfig, size: int) -> Tensor:
    """What a rank's parameter holds of one of the logical tensors that are fused in it."""
    module = tensor.split(".")[-2]
    if module in ("query", "key", "value"):
        groups, d = model.num_query_groups // size, model.kv_channels
        per_group = model.num_attention_heads // model.num_query_groups
        fused = shard.view(groups, per_group + 2, d, *shard.shape[1:])
        rows = {
            "query": fused[:, :per_group],
            "key": fused[:, per_group : per_group + 1],
            "value": fused[:, per_group + 1 :],
        }[module]
        return rows.reshape(-1, *shard.shape[1:])
    if module in ("gate", "up") and model.swiglu:
        return shard.chunk(2)[module == "up"]
    return shard


def halves(rows: Tensor, model: ModelConfig) -> Tensor:
    """Reorder each head's rows [heads · d, …] from RoPE on neighbours to RoPE on halves.

    Rows 2i and 2i + 1 of the r rotated ones become i and i + r/2; the scores stay the same.
    """
    d = model.kv_channels
    rotated = int(d * model.rotary_percent)
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, d)]
    heads = rows.view(-1, d, *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)
