"""Weight gradients that wait: the second half of a backward that is split in two.

A split backward first computes the gradients of inputs, which an earlier pipeline stage waits for,
and those of weights when nothing else is to do (Qi et al., arXiv:2401.10241). Linear layers leave
the second half here; engines collect it and run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge


@dataclass(frozen=True)
class Deferred:
    """The gradient of a weight from one micro-batch, not yet computed.

    It keeps alive what the product needs: the layer's input and its output's gradient.
    """

    weight: nn.Parameter
    product: Callable[[], Tensor]

    def compute(self) -> Tensor:
        """The gradient, of the weight's shape."""
        with torch.no_grad():  # unlike a backward, the second half is an ordinary call
            return self.product()


class WeightGradients:
    """Where the linear layers of a rank leave their weights' gradients in a split backward."""

    def __init__(self) -> None:
        self._waiting: list[Deferred] | None = None

    @property
    def are_deferred(self) -> bool:
        """Whether a split backward runs now."""
        return self._waiting is not None

    @contextmanager
    def deferred(self) -> Iterator[list[Deferred]]:
        """A backward in this block computes no gradient of a linear layer's weight; the list that
        is handed out holds them in the end."""
        waiting: list[Deferred] = []
        self._waiting = waiting
        try:
            yield waiting
        finally:
            self._waiting = None

    def put_off(self, output: Tensor | GradientEdge, gradient: Tensor) -> list[Deferred]:
        """The first half of a split backward; returns what the second half computes."""
        with self.deferred() as waiting:
            torch.autograd.backward(output, gradient)
        return waiting

    def leave(self, weight: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """Put a gradient off; only while `are_deferred`."""
        assert self._waiting is not None
        self._waiting.append(Deferred(weight, product))
