"""Every part of a step is looked at, also where a backward is split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron_lite.numerics.nonfinite import Finding, Watch

NAN = float("nan")


@dataclass(frozen=True)
class Later:
    """A weight's gradient that was put off."""

    weight: nn.Parameter
    product: Callable[[], Tensor]


class Stage:
    """Stage 3 of a model: two linear layers; the weight gradient of the second one may be put off
    and bad."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.modules = {"": nn.Sequential(self.first, self.second)}
        self.modules |= {"layers.6": self.first, "layers.7": self.second}
        self.computed: list[Tensor] = []

    def forward(self, stage: int, batch: Any, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        output: Tensor = self.modules[""](hidden)
        return output

    def backward(self, output: Any, gradient: Tensor) -> None:
        torch.autograd.backward(output, gradient)

    def backward_input(self, output: Any, gradient: Tensor) -> list[Later]:
        torch.autograd.backward(output, gradient)
        return [Later(self.second.weight, lambda: torch.full((4, 4), NAN))]

    def backward_weight(self, waiting: list[Later]) -> None:
        self.computed = [later.product() for later in waiting]

    def watch(self, batches: list[object]) -> Watch:
        named = [("layers.6.weight", self.first.weight), ("layers.7.weight", self.second.weight)]
        return Watch({3: self.modules}, named, batches=batches, compute=self)


def what(finding: Finding) -> tuple[Any, ...]:
    return finding.phase, finding.micro_batch, finding.name, finding.tensor


def test_each_micro_batch_has_its_first_finding_and_hooks_are_gone_afterwards() -> None:
    stage, batches = Stage(), [object() for _ in range(4)]
    inputs = [torch.ones(2, 4) for _ in batches]
    inputs[1][0, 0] = NAN
    stage.second.register_forward_hook(
        lambda module, inputs, output: output * NAN if spoilt == 2 else output
    )
    with stage.watch(batches) as watch:
        for spoilt, (batch, hidden) in enumerate(zip(batches, inputs, strict=True)):
            output = watch.forward(3, batch, hidden)
            gradient = torch.full((2, 4), NAN if spoilt == 3 else 1.0)
            watch.backward(output if spoilt else get_gradient_edge(output), gradient)
    assert [what(finding) for finding in watch.found.values()] == [
        ("forward", 1, "", "input"),
        ("forward", 2, "layers.7", "output"),
        ("backward", 3, "", "gradient of the output"),
    ]
    spoilt = 2
    stage.forward(3, None, inputs[1])
    assert len(watch.found) == 3
    assert not stage.first._forward_hooks and not stage.first.weight._backward_hooks


def test_a_gradient_that_was_put_off_is_looked_at_when_it_is_computed() -> None:
    stage, batch = Stage(), object()
    with stage.watch([batch]) as watch:
        output = watch.forward(3, batch, torch.ones(2, 4))
        waiting = watch.backward_input(output, torch.ones(2, 4))
        assert not watch.found
        seen = watch._count
        watch.backward_weight(waiting)
    assert what(watch.found[0]) == ("backward", 0, "layers.7.weight", "gradient")
    assert watch.found[0].number > seen, "behind what the first half showed"
    assert stage.computed[0].isnan().all(), "and nothing was changed by looking"


def test_weights_come_first() -> None:
    stage = Stage()
    with stage.watch([]) as watch:
        watch.weight("layers.6.weight", torch.tensor([1.0, NAN]))
        watch.weight("layers.7.weight", torch.tensor([NAN]))
    watch.summed("layers.7.weight")
    assert [what(finding) for finding in watch.found.values()] == [
        ("weight", None, "layers.6.weight", "weight")
    ]
