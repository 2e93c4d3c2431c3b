"""Column- and row-parallel linear layers (Shoeybi et al., arXiv:1909.08053, section 3).

Column: the output features are cut, every rank reads the whole input. Row: the input features are
cut, the partial outputs are summed. `t` tokens, `k` input and `n` output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.deferred import WeightGradients
from megatron_lite.mpu.groups import Group
from megatron_lite.mpu.mappings import (
    all_gather_first,
    reduce_from_tensor_region,
    reduce_scatter,
    reduce_scatter_to_sequence_region,
)
from megatron_lite.sharding.placement import replicated, sharded, stacked


class ColumnParallelLinear(nn.Module):
    """x [t, k] (t / size of them under sequence parallelism) → y [t, n / size].

    `outputs` maps logical names to feature counts; several are fused into one weight, and every
    rank holds its shard of each, one below the other. The bias is cut like the weight.
    """

    def __init__(
        self,
        context: LayerContext,
        outputs: Mapping[str, int],
        in_features: int,
        *,
        bias: bool,
        init: Init,
    ) -> None:
        super().__init__()
        self.group = context.group
        self.sequence_parallel = context.sequence_parallel
        self.weight_gradients = context.weight_gradients
        cut = {"dim": 0, "rank": self.group.rank, "size": self.group.size}
        weights = [sharded(f"{m}.weight", (n, in_features), **cut) for m, n in outputs.items()]
        self.weight = context.parameter(stacked(*weights), init)
        self.bias = None
        if bias:
            biases = [sharded(f"{m}.bias", (n,), **cut) for m, n in outputs.items()]
            self.bias = context.parameter(stacked(*biases), Init())

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel_linear(
            x,
            self.weight,
            self.bias,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            later=self.weight_gradients,
        )


class RowParallelLinear(nn.Module):
    """x [t, k / size] → y [t, n] (t / size of them under sequence parallelism).

    The bias is whole on every rank and added once, after the sum.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init: Init,
    ) -> None:
        super().__init__()
        self.group = context.group
        self.sequence_parallel = context.sequence_parallel
        self.weight_gradients = context.weight_gradients
        shape, rank = (out_features, in_features), self.group.rank
        cut = sharded(f"{name}.weight", shape, dim=1, rank=rank, size=self.group.size)
        self.weight = context.parameter(cut, init)
        self.bias = None
        if bias:
            self.bias = context.parameter(
                replicated(f"{name}.bias", (out_features,), rank=rank),
                Init(),
                partial_grad=context.sequence_parallel,
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return _linear(x, self.weight, self.bias, self.weight_gradients)
        y = _linear(x, self.weight, None, self.weight_gradients)
        if self.sequence_parallel:
            y = reduce_scatter_to_sequence_region(y, self.group)
        else:
            y = reduce_from_tensor_region(y, self.group)
        return y if self.bias is None else y + self.bias


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    group: Group,
    sequence_parallel: bool,
    later: WeightGradients | None = None,
) -> Tensor:
    """x [t, k] · weightᵀ [k, n / size] with the input's gradient summed over the group.

    Under sequence parallelism x is [t / size, k]: it is gathered here, and again in the backward.
    `later` takes the weight's gradient in a split backward; the weight is a parameter then.
    """
    if group.size == 1:
        return _linear(x, weight, bias, later)
    return _ColumnLinear.apply(x, weight, bias, group, sequence_parallel, later)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients | None
) -> Tensor:
    """x [t, k] · weightᵀ [k, n] on this rank alone."""
    if later is None:
        return F.linear(x, weight, bias)
    return _SplitLinear.apply(x, weight, bias, later)


class _SplitLinear(Function):
    """A linear layer whose weight's gradient can wait."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        later: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.later, ctx.has_bias = weight, later, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_weight = _now_or(ctx.later, ctx.parameter, lambda grad, x: grad.t() @ x, grad, x)
        return grad @ weight, grad_weight, grad.sum(0) if ctx.has_bias else None, None


class _ColumnLinear(Function):
    """The input's gradient travels while the weight's is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        later: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # What was saved may come back as a copy; a deferred gradient has to know whose it is.
        ctx.parameter = None if later is None else weight
        ctx.later, ctx.has_bias = later, bias is not None
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return F.linear(all_gather_first(x, group) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        group, sequence_parallel = ctx.group, ctx.sequence_parallel
        summed = grad_x = grad @ weight
        if sequence_parallel:
            summed = torch.empty_like(x)
            work = reduce_scatter(summed, grad_x, group=group.handle, async_op=True)
        else:
            work = dist.all_reduce(grad_x, group=group.handle, async_op=True)

        def product(grad: Tensor, x: Tensor) -> Tensor:
            return grad.t() @ (all_gather_first(x, group) if sequence_parallel else x)

        grad_weight = _now_or(ctx.later, ctx.parameter, product, grad, x)
        grad_bias = grad.sum(0) if ctx.has_bias else None
        work.wait()
        return summed, grad_weight, grad_bias, None, None, None


def _now_or(
    later: WeightGradients | None,
    weight: nn.Parameter,
    product: Callable[[Tensor, Tensor], Tensor],
    grad: Tensor,
    x: Tensor,
) -> Tensor | None:
    """A weight's gradient, the product of its output's gradient and its input, or None where a
    split backward computes it later."""
    if later is None or not later.are_deferred:
        return product(grad, x)
    # Without the graphs that hang on them, or all of the stage's would wait, too.
    later.leave(weight, partial(product, grad.detach(), x.detach()))
    return None
