"""LayerContext: what every layer needs to create its parameters, and their first values.

It is handed down from the composition root; layers hold no other link to the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_lite.layers.deferred import WeightGradients
from megatron_lite.mpu.groups import Group
from megatron_lite.mpu.random import RngStreams, derive_seed
from megatron_lite.sharding.placement import Box, Placement

_BLOCK_ELEMENTS = 1 << 20
"""First values are drawn in blocks of whole rows of about this many elements, each from a generator
of its own, so that a rank draws (nearly) only the rows that it holds."""


@dataclass(frozen=True)
class Init:
    """First values: a normal distribution around `mean`, or the constant where `std` is 0."""

    std: float = 0.0
    mean: float = 0.0


@dataclass(frozen=True)
class LayerContext:
    """Where a layer lives: its tensor-parallel group, device and dtype, seed and random streams."""

    group: Group = field(default_factory=Group)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    seed: int = 0
    sequence_parallel: bool = False
    """Between the tensor-parallel regions each rank holds `t / size` of the tokens."""
    streams: RngStreams = field(default_factory=lambda: RngStreams(torch.device("cpu")))
    weight_gradients: WeightGradients | None = None
    """Given where backwards are split in two. None: every backward computes all gradients."""
    gradients_apart: bool = False
    """Whether 16-bit gradients are added up in float32 outside of the graph, each as it comes."""

    def parameter(
        self, placement: Placement, init: Init, *, partial_grad: bool = False
    ) -> nn.Parameter:
        """Create a parameter that knows where it sits in the logical model.

        Its first values depend on the seed and on logical names and indices only, so they are the
        same model on every layout. Padding starts as zeros. `partial_grad` states that each rank
        of the tensor group computes a summand of the gradient only.
        """
        data = torch.zeros(placement.shape, dtype=self.dtype, device=self.device)
        rows = placement.segments
        for segment in rows:
            local = data[segment.row : segment.row + segment.box.size[0]]
            local.copy_(draw(segment.tensor, segment.shape, segment.box, init=init, seed=self.seed))
        parameter = nn.Parameter(data)
        parameter.placement = placement  # type: ignore[attr-defined]
        parameter.partial_grad = partial_grad and self.group.size > 1  # type: ignore[attr-defined]
        return parameter


def placement_of(parameter: Tensor) -> Placement:
    """The Placement that the parameter was created with."""
    placement = parameter.placement  # type: ignore[attr-defined]
    assert isinstance(placement, Placement)
    return placement


def has_partial_grad(parameter: Tensor) -> bool:
    """True where tensor-parallel ranks hold copies but compute summands of the gradient."""
    return bool(parameter.partial_grad)  # type: ignore[attr-defined]


def draw(name: str, shape: tuple[int, ...], box: Box, *, init: Init, seed: int) -> Tensor:
    """Values of `box` of a logical tensor, float32 on the CPU, the same whoever draws which box."""
    if init.std == 0.0:
        return torch.full(box.size, init.mean)
    tail = shape[1:]
    rows = max(1, _BLOCK_ELEMENTS // max(1, torch.Size(tail).numel()))
    first, last = box.offset[0], box.offset[0] + box.size[0]
    out = torch.empty(box.size)
    for block in range(first // rows, -(-last // rows)):
        generator = torch.Generator().manual_seed(derive_seed(seed, name, block))
        begin, end = block * rows, min((block + 1) * rows, shape[0])
        values = torch.empty(end - begin, *tail).normal_(init.mean, init.std, generator=generator)
        part = Box((begin, *[0] * len(tail)), (end - begin, *tail)).intersect(box)
        assert part is not None
        out[part.slices(box.offset)] = values[part.slices((begin, *[0] * len(tail)))]
    return out
