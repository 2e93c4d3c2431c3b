"""GradientAccumulator: sums gradients over micro-batches and over the ranks that hold copies.

It ends where ZeRO begins: what it returns is ready to be averaged over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_lite.layers.context import has_partial_grad, placement_of
from megatron_lite.mpu.groups import Group
from megatron_lite.mpu.mappings import all_reduce


class GradientAccumulator:
    """Gradients of `parameters` over one step.

    With `fp32`, 16-bit gradients of several micro-batches are added up in a float32 buffer a
    parameter, kept from step to step. Otherwise, and with a single micro-batch, autograd's own
    `.grad` serves.

    A tied table's two gradients are one running sum where one rank holds both ends of the model
    (zbv, dualpipev, one stage), two sums added up elsewhere. So schedules may differ by the
    rounding of float32, by 2e-8 of the largest element where it was measured. In 16 bits that
    changes a weight's last digit now and then, and later losses by some 1e-5.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        fp32: bool,
        tensor_group: Group,
        shared: Sequence[nn.Parameter] = (),
        shared_group: Group | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.fp32 = fp32
        self._index = {p: i for i, p in enumerate(self.parameters)}
        self._tensor_group = tensor_group
        self._partial = [i for i, p in enumerate(self.parameters) if has_partial_grad(p)]
        self._shared = [i for i, p in enumerate(self.parameters) if any(p is s for s in shared)]
        self._shared_group = shared_group or Group()
        self._buffers: dict[int, Tensor] = {}
        self._filled: set[int] = set()
        self._buffering = False
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))

    def begin(self, num_microbatches: int) -> None:
        """Start a step: whatever was left of the last one is dropped."""
        self._buffering = self.fp32 and num_microbatches > 1
        self._filled.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            if self._buffering and parameter.grad is not None:
                self._to_buffer(index, parameter.grad)
                parameter.grad = None

        return take

    def add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add what a micro-batch gives besides autograd: a gradient that was deferred."""
        if self._buffering:
            self._to_buffer(self._index[parameter], grad)
        elif parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)

    def _to_buffer(self, index: int, grad: Tensor) -> None:
        if index in self._filled:
            self._buffers[index].add_(grad)
            return
        if index not in self._buffers:
            self._buffers[index] = torch.empty_like(grad, dtype=torch.float32)
        self._buffers[index].copy_(grad)
        self._filled.add(index)

    def ready(self) -> list[Tensor]:
        """The step's gradients in the parameters' dtype; parameters and buffers let go of them.

        A float32 sum is rounded here, once. A parameter that took no part has a zero gradient.
        """
        sums = [self._take(i, p) for i, p in enumerate(self.parameters)]
        self._sum_over(self._tensor_group, [sums[i] for i in self._partial])
        self._sum_over(self._shared_group, [sums[i] for i in self._shared])
        return [g.to(p.dtype) for g, p in zip(sums, self.parameters, strict=True)]

    def _take(self, index: int, parameter: nn.Parameter) -> Tensor:
        grad, parameter.grad = parameter.grad, None
        if index in self._filled:
            return self._buffers[index]
        return torch.zeros_like(parameter) if grad is None else grad.contiguous()

    @staticmethod
    def _sum_over(group: Group, tensors: Sequence[Tensor]) -> None:
        """Sum in place over the group, one message a dtype."""
        if group.size == 1 or not tensors:
            return
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            same = [t for t in tensors if t.dtype == dtype]
            flat = all_reduce(_flatten_dense_tensors(same), group)
            for tensor, total in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
                tensor.copy_(total)


def first_nonfinite(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> str | None:
    """Logical names of the first parameter whose gradient has a NaN or an infinity."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not torch.isfinite(gradient).all():
            return ", ".join(placement_of(parameter).names)
    return None
