"""Cross entropy over a vocabulary that is cut over the tensor group; logits are never gathered.

Of each token only three numbers cross the group: the largest logit, the sum of exponentials and
the target's logit (Shoeybi et al., arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron_lite.mpu.groups import Group

_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}
"""float32 work space by device: rows are handled a few at a time, so that the logits exist once, in
their own dtype, and on a CPU the work space stays in the cache."""


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, *, vocab_size: int, group: Group
) -> Tensor:
    """Σ weights · (−log softmax(logits)[target]), float32, 0-dim.

    logits [t, V_padded / size], targets [t] int64, weights [t] float32. Columns from `vocab_size`
    on are padding and take no part in the softmax. The call *consumes* the logits: the backward
    writes their gradient over them.
    """
    return _CrossEntropy.apply(logits, targets, weights, vocab_size, group)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, group: Group
    ) -> Tensor:
        width = logits.shape[1]
        first = group.rank * width
        columns = max(0, min(width, vocab_size - first))
        local = targets - first
        absent = (local < 0) | (local >= columns)
        local = local.masked_fill(absent, 0)
        log_sum = _log_sum_exp(logits[:, :columns], group)
        picked = logits.gather(1, local[:, None])[:, 0].float().masked_fill(absent, 0.0)
        if group.size > 1:
            dist.all_reduce(picked, group=group.handle)
        ctx.save_for_backward(logits, log_sum, local, absent, weights)
        ctx.columns = columns
        return torch.dot(log_sum - picked, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, log_sum, local, absent, weights = ctx.saved_tensors
        scale = weights * grad
        for rows in _chunks(logits) if ctx.columns else ():
            part = logits[rows, : ctx.columns]
            soft = part.float().sub_(log_sum[rows, None]).exp_().mul_(scale[rows, None])
            soft.scatter_add_(
                1, local[rows, None], scale[rows].masked_fill(absent[rows], 0.0).neg_()[:, None]
            )
            part.copy_(soft)
        logits[:, ctx.columns :] = 0
        return logits, None, None, None, None


def _log_sum_exp(logits: Tensor, group: Group) -> Tensor:
    """log Σ exp over the columns of all ranks, float32 [t]."""
    parts = [torch.logsumexp(logits[rows].float(), dim=1) for rows in _chunks(logits)]
    local = torch.cat(parts)
    if group.size == 1:
        return local
    largest = local.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.handle)
    total = (local - largest).exp_()
    dist.all_reduce(total, group=group.handle)
    return total.log_().add_(largest)


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, _CHUNK_BYTES[logits.device.type] // (4 * max(1, logits.shape[1])))
    return [slice(i, i + rows) for i in range(0, logits.shape[0], rows)]
