"""Collectives with a gradient: the moves between whole, sharded and partial tensors.

Each pair is its own mirror: what the forward does the backward undoes. `t` counts tokens (batch ×
sequence, flattened) in dimension 0; sequence parallelism shards that dimension, tensor
parallelism the last one. On a group of one rank all of them return their input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron_lite.mpu.groups import Group

# torch 2.13 renamed both; the old names warn there, the new ones don't exist before it.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group in place (no gradient)."""
    if group.size > 1:
        dist.all_reduce(x, group=group.handle)
    return x


def all_gather_first(x: Tensor, group: Group) -> Tensor:
    """[n, …] on each rank → [n · size, …] (no gradient)."""
    if group.size == 1:
        return x
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    _all_gather(out, x.contiguous(), group=group.handle)
    return out


def reduce_scatter_first(x: Tensor, group: Group) -> Tensor:
    """[n · size, …] partial sums on each rank → this rank's [n, …] of the sum (no gradient)."""
    if group.size == 1:
        return x
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    reduce_scatter(out, x.contiguous(), group=group.handle)
    return out


def split_first(x: Tensor, group: Group) -> Tensor:
    """[n · size, …] → this rank's [n, …], a view (no gradient)."""
    return x if group.size == 1 else x.chunk(group.size, dim=0)[group.rank]


def split_last(x: Tensor, group: Group) -> Tensor:
    """[…, n · size] → this rank's […, n], a view (no gradient)."""
    return x if group.size == 1 else x.chunk(group.size, dim=-1)[group.rank]


def all_gather_last(x: Tensor, group: Group) -> Tensor:
    """[…, n] on each rank → […, n · size] (no gradient)."""
    if group.size == 1:
        return x
    shards = all_gather_first(x.unsqueeze(0), group)
    return torch.cat(shards.unbind(0), dim=-1)


def copy_to_tensor_region(x: Tensor, group: Group) -> Tensor:
    """Identity; the gradient is summed over the group."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_tensor_region(x: Tensor, group: Group) -> Tensor:
    """Sum over the group; the gradient passes unchanged."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def scatter_to_tensor_region(x: Tensor, group: Group) -> Tensor:
    """[…, n · size] → […, n]; the gradient is gathered."""
    return x if group.size == 1 else _ScatterLast.apply(x, group)


def gather_from_tensor_region(x: Tensor, group: Group) -> Tensor:
    """[…, n] → […, n · size]; the gradient is cut."""
    return x if group.size == 1 else _GatherLast.apply(x, group)


def scatter_to_sequence_region(x: Tensor, group: Group) -> Tensor:
    """[t, h] → [t / size, h]; the gradient is gathered."""
    return x if group.size == 1 else _ScatterFirst.apply(x, group)


def gather_from_sequence_region(x: Tensor, group: Group) -> Tensor:
    """[t / size, h] → [t, h] before a column-parallel layer; the gradient is reduce-scattered."""
    return x if group.size == 1 else _GatherFirst.apply(x, group)


def reduce_scatter_to_sequence_region(x: Tensor, group: Group) -> Tensor:
    """[t, h] partial sums → [t / size, h] of the sum; the gradient is gathered."""
    return x if group.size == 1 else _ReduceScatterFirst.apply(x, group)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient to another consumer of `x`.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        # `x` is a product that nothing else reads, so it is summed where it lies.
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ScatterLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return split_last(x, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_last(grad, ctx.group), None


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_last(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return split_last(grad, ctx.group).contiguous(), None


class _ScatterFirst(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return split_first(x, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_first(grad, ctx.group), None


class _GatherFirst(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_first(grad, ctx.group), None


class _ReduceScatterFirst(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_first(grad, ctx.group), None
