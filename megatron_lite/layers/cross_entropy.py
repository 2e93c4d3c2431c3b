"""Cross entropy over a vocabulary that is cut over the tensor group; logits are never gathered.

Of each token only three numbers cross the group: the largest logit, the sum of exponentials and
the target's logit (Shoeybi et al., arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron_lite.mpu.groups import Group

LossKernels = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Any]]
"""What reads all logits [t, v]: (logits) → log Σ exp, float32 [t]; and (logits, log_sum [t],
scale [t]), which writes scale · exp(logits − log_sum) over the logits."""
_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}
"""float32 work space by device: rows are handled a few at a time, so that the logits exist once, in
their own dtype, and on a CPU the work space stays in the cache."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    vocab_size: int,
    group: Group,
    kernels: LossKernels | None = None,
) -> Tensor:
    """Σ weights · (−log softmax(logits)[target]), float32, 0-dim.

    logits [t, V_padded / size], targets [t] int64, weights [t] float32. Columns from `vocab_size`
    on are padding and take no part in the softmax. The call *consumes* the logits: the backward
    writes their gradient over them. `kernels`: None, or those of `loss_kernels`.
    """
    return _CrossEntropy.apply(logits, targets, weights, vocab_size, group, kernels or _CHUNKED)


def loss_kernels(*, compiled: bool) -> LossKernels:
    """The two functions that read all logits.

    Compiled, each reads them once (the first one twice, from the cache) and needs no work space;
    otherwise torch's functions do it, a few rows at a time.
    """
    if not compiled:
        return _CHUNKED
    return torch.compile(_log_sum_exp), torch.compile(_softmax_over)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor,
        vocab_size: int,
        group: Group,
        kernels: LossKernels,
    ) -> Tensor:
        width = logits.shape[1]
        first = group.rank * width
        columns = max(0, min(width, vocab_size - first))
        local = targets - first
        absent = (local < 0) | (local >= columns)
        local = local.masked_fill(absent, 0)
        log_sum = kernels[0](logits[:, :columns]) if columns else _nothing(logits)
        log_sum = _over_ranks(log_sum, group)
        own = logits.gather(1, local[:, None])[:, 0].float()
        picked = own.masked_fill(absent, 0.0)
        if group.size > 1:
            dist.all_reduce(picked, group=group.handle)
        ctx.save_for_backward(logits, log_sum, local, absent, own, weights)
        ctx.columns, ctx.softmax_over = columns, kernels[1]
        return torch.dot(log_sum - picked, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, log_sum, local, absent, own, weights = ctx.saved_tensors
        scale = weights * grad
        if ctx.columns:
            ctx.softmax_over(logits[:, : ctx.columns], log_sum, scale)
            # In float32 from the logit itself: near 1 the rounded softmax minus 1 would be noise.
            at_target = torch.expm1(own - log_sum).mul_(scale).to(logits.dtype)
            # Not by scatter_, which copies all logits to and fro on a CPU.
            rows = torch.arange(logits.shape[0], device=logits.device)
            logits[rows, local] = torch.where(absent, logits[rows, local], at_target)
        logits[:, ctx.columns :] = 0
        return logits, None, None, None, None, None


def _nothing(logits: Tensor) -> Tensor:
    """log Σ exp over no column at all: a rank that holds only padding."""
    return torch.full((logits.shape[0],), -torch.inf, device=logits.device)


def _over_ranks(log_sum: Tensor, group: Group) -> Tensor:
    """log Σ exp over the columns of all ranks, from those of each; float32 [t]."""
    if group.size == 1:
        return log_sum
    largest = log_sum.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.handle)
    total = (log_sum - largest).exp_()
    dist.all_reduce(total, group=group.handle)
    return total.log_().add_(largest)


def _log_sum_exp(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits.float(), dim=1)


def _softmax_over(logits: Tensor, log_sum: Tensor, scale: Tensor) -> None:
    logits.copy_((logits - log_sum[:, None]).exp_().mul_(scale[:, None]))


def _chunked_log_sum_exp(logits: Tensor) -> Tensor:
    return torch.cat([_log_sum_exp(logits[rows]) for rows in _chunks(logits)])


def _chunked_softmax_over(logits: Tensor, log_sum: Tensor, scale: Tensor) -> None:
    for rows in _chunks(logits):
        _softmax_over(logits[rows], log_sum[rows], scale[rows])


_CHUNKED: LossKernels = (_chunked_log_sum_exp, _chunked_softmax_over)


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, _CHUNK_BYTES[logits.device.type] // (4 * max(1, logits.shape[1])))
    return [slice(i, i + rows) for i in range(0, logits.shape[0], rows)]
