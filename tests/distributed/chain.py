"""A chain of small stages in double precision, for tests of the executor alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite.layers.deferred import Deferred, WeightGradients
from megatron_lite.layers.linear import column_parallel_linear
from megatron_lite.mpu.groups import Group
from megatron_lite.pipeline.executor import Root

WIDTH, ROWS = 6, 3


class Stages:
    """A chain of tanh(linear) layers in double precision; the last one's loss is a weighted sum."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(count)
        draws = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(count)]
        self.weights = [nn.Parameter(draw / WIDTH**0.5) for draw in draws]
        self.later = WeightGradients()

    def forward(self, stage: int, micro_batch: Tensor, hidden: Tensor | None) -> Tensor:
        given = micro_batch if hidden is None else hidden
        inner = torch.tanh(
            column_parallel_linear(
                given,
                self.weights[stage],
                None,
                group=Group(),
                sequence_parallel=False,
                later=self.later,
            )
        )
        last = stage == len(self.weights) - 1
        return (inner * micro_batch).sum() if last else inner

    def backward(self, output: Root, gradient: Tensor) -> None:
        torch.autograd.backward(output, gradient)

    def backward_input(self, output: Root, gradient: Tensor) -> list[Deferred]:
        return self.later.put_off(output, gradient)

    def backward_weight(self, waiting: list[Deferred]) -> None:
        for half in waiting:
            given = half.compute()
            half.weight.grad = given if half.weight.grad is None else half.weight.grad + given

    def gradients(self) -> dict[int, np.ndarray]:
        """The gradient of each stage's weight that was used here."""
        used = {i: w.grad for i, w in enumerate(self.weights) if w.grad is not None}
        return {stage: grad.numpy() for stage, grad in used.items()}


def micro_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return list(torch.randn(count, ROWS, WIDTH, generator=generator, dtype=torch.float64))
