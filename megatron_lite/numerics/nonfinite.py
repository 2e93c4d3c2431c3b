"""Watch: hooks that find the first value of a step that is not finite, while the step is run again.

It knows no rank and no model: forensics.py says what things are called, and compares ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

Phase = Literal["weight", "forward", "backward", "sum"]
"""Before anything runs, in an action of a micro-batch, or once all gradients are added up."""


@dataclass(frozen=True)
class Values:
    """What a tensor with non-finite values holds."""

    shape: tuple[int, ...]
    dtype: str
    nan: int
    infinite: int
    first: tuple[int, ...]
    """Indices of the first non-finite value."""
    smallest: float | None
    """Of the finite ones, like `largest`; None where there are none."""
    largest: float | None

    def __str__(self) -> str:
        kinds = [f"{n} {name}" for n, name in ((self.nan, "NaN"), (self.infinite, "infinite")) if n]
        rest = "no other" if self.smallest is None else f"others {self.smallest:g}"
        if self.smallest != self.largest:
            rest += f" to {self.largest:g}"
        where = f", the first at {list(self.first)}" if self.shape else ""
        return f"{self.dtype} {list(self.shape)}: {' and '.join(kinds)}{where}; {rest}"


def nonfinite_values(tensor: Tensor) -> Values | None:
    """What a floating-point tensor holds; None where all of it is finite."""
    tensor = tensor.detach()
    finite = torch.isfinite(tensor)
    if bool(finite.all()):
        return None
    flat = int(finite.flatten().to(torch.uint8).argmin())
    rest, nan = tensor[finite], int(torch.isnan(tensor).sum())
    return Values(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nan=nan,
        infinite=int((~finite).sum()) - nan,
        first=tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), tensor.shape)),
        smallest=float(rest.min()) if rest.numel() else None,
        largest=float(rest.max()) if rest.numel() else None,
    )


@dataclass(frozen=True)
class Finding:
    """A tensor of one rank that is not finite."""

    phase: Phase
    stage: int
    micro_batch: int | None
    number: int
    """How many tensors of the same phase, stage and micro-batch were looked at before it."""
    name: str
    """Of the module or parameter in the logical model; "" for the stage itself."""
    tensor: str
    """Which tensor of it, such as "output" or "gradient"."""
    values: Values | None
    """None where nobody has them any more."""

    @property
    def order(self) -> tuple[float, ...]:
        """Rises along a replica's computation: what comes later can be caused by what is earlier.

        Micro-batches don't touch one another, so the number of one says all; gradients come back
        through the stages, last to first.
        """
        if self.micro_batch is None:
            return (-1.0 if self.phase == "weight" else math.inf, 0, self.stage, self.number)
        if self.phase == "forward":
            return (self.micro_batch, 0, self.stage, self.number)
        return (self.micro_batch, 1, -self.stage, self.number)


class Watch:
    """Looks at everything that one rank's stages compute of a step, while entered.

    `modules` are those of each stage by name, `parameters` all of the rank's with their names. The
    step has to run through the watch, which hands each action on to `compute` (an engine).
    """

    def __init__(
        self,
        modules: Mapping[int, Mapping[str, nn.Module]],
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        batches: Sequence[Any],
        compute: Any,
    ) -> None:
        self._modules, self._parameters = modules, parameters
        self._numbers = {id(batch): number for number, batch in enumerate(batches)}
        self._compute = compute
        self._made_by: dict[Any, tuple[int, int]] = {}
        """Stage and micro-batch of a forward, by its output's node in the graph."""
        self._put_off: dict[int, tuple[int, int, int]] = {}
        """The same of the first half of a backward, and the tensors seen, by what it left."""
        self._handles: list[RemovableHandle] = []
        self._phase: Phase = "weight"
        self._stage, self._count = min(modules), 0
        self._micro_batch: int | None = None
        self.found: dict[int | None, Finding] = {}
        """The first finding of each micro-batch; None: the first one outside of micro-batches."""

    def __enter__(self) -> Self:
        for modules in self._modules.values():
            for name, module in modules.items():
                before, after = partial(self._inputs, name), partial(self._outputs, name)
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after))
        for name, parameter in self._parameters:
            hook = partial(self._look, name, "gradient")
            self._handles.append(parameter.register_hook(hook))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def weight(self, name: str, values: Tensor) -> None:
        """Look at what a parameter holds; before the first forward."""
        self._look(name, "weight", values)

    def summed(self, names: str) -> None:
        """Take note that the sum over micro-batches of a parameter's gradient is not finite."""
        found = Finding("sum", self._stage, None, self._count, names, "gradient", None)
        self.found.setdefault(None, found)

    def forward(self, stage: int, batch: Any, hidden: Tensor | None) -> Tensor:
        """Run a forward and look at all of it."""
        self._begin("forward", stage, self._numbers[id(batch)])
        if hidden is not None:
            self._look("", "input", hidden)
        output: Tensor = self._compute.forward(stage, batch, hidden)
        self._made_by[output.grad_fn] = (stage, self._numbers[id(batch)])
        return output

    def backward(self, output: Tensor | GradientEdge, gradient: Tensor) -> None:
        """Run a backward and look at all of it."""
        self._begin_backward(output, gradient)
        self._compute.backward(output, gradient)

    def backward_input(self, output: Tensor | GradientEdge, gradient: Tensor) -> Any:
        """Run the first half of a split backward and look at all of it."""
        self._begin_backward(output, gradient)
        waiting = [self._watched(one) for one in self._compute.backward_input(output, gradient)]
        assert self._micro_batch is not None
        self._put_off[id(waiting)] = (self._stage, self._micro_batch, self._count)
        return waiting

    def backward_weight(self, waiting: Any) -> None:
        """Run the second half and look at all of it."""
        *action, seen = self._put_off.pop(id(waiting))
        self._begin("backward", *action)
        self._count = seen
        self._compute.backward_weight(waiting)

    def _begin_backward(self, output: Tensor | GradientEdge, gradient: Tensor) -> None:
        node = output.grad_fn if isinstance(output, Tensor) else output.node
        self._begin("backward", *self._made_by.pop(node))
        self._look("", "gradient of the output", gradient)

    def _watched(self, deferred: Any) -> Any:
        """A weight's gradient that was put off, looked at when it is computed."""
        name = next(n for n, parameter in self._parameters if parameter is deferred.weight)

        def product() -> Tensor:
            gradient: Tensor = deferred.product()
            self._look(name, "gradient", gradient)
            return gradient

        return replace(deferred, product=product)

    def _begin(self, phase: Phase, stage: int, micro_batch: int) -> None:
        self._phase, self._stage, self._micro_batch = phase, stage, micro_batch
        self._count = 0

    def _inputs(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for value in inputs:
            if isinstance(value, Tensor):
                self._look(name, self._again("input"), value)

    def _outputs(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        self._look(name, self._again("output"), output)
        if output.requires_grad and self._phase == "forward":
            output.register_hook(partial(self._look, name, "gradient of the output"))

    def _again(self, tensor: str) -> str:
        """A module that runs in a backward is computed for the second time."""
        return tensor if self._phase == "forward" else f"recomputed {tensor}"

    def _look(self, name: str, tensor: str, values: Tensor | None) -> None:
        self._count += 1
        if self._micro_batch in self.found:
            return
        if values is None or not values.is_floating_point():
            return  # None: the first half of a backward has no gradient for this weight yet
        if (bad := nonfinite_values(values)) is not None:
            self.found[self._micro_batch] = Finding(
                self._phase, self._stage, self._micro_batch, self._count, name, tensor, bad
            )
