"""Between a module's own parameters and logical tensors, by the placements alone; for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from megatron_lite.layers.context import placement_of
from megatron_lite.sharding.placement import Piece


def _view(local: Tensor, piece: Piece) -> Tensor:
    flat = local.view(-1)[piece.start : piece.start + piece.box.numel]
    return flat.view(piece.box.size)


def logical_parts(
    module: nn.Module, of: Callable[[nn.Parameter], Tensor] = lambda p: p.detach()
) -> dict[str, np.ndarray]:
    """What this rank holds of each logical tensor (or of what `of` takes from a parameter), NaN
    where others hold it."""
    whole: dict[str, np.ndarray] = {}
    for parameter in module.parameters():
        values = of(parameter).contiguous()
        assert values.shape == parameter.shape
        for piece in placement_of(parameter).pieces():
            if piece.tensor not in whole:
                whole[piece.tensor] = np.full(piece.shape, np.nan, dtype=np.float32)
            whole[piece.tensor][piece.box.slices()] = _view(values, piece).float().numpy()
    return whole


def gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, for `logical_parts`."""
    assert parameter.grad is not None
    return parameter.grad


def fill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set parameters from logical tensors; padding keeps its value."""
    with torch.no_grad():
        for parameter in module.parameters():
            for piece in placement_of(parameter).pieces():
                _view(parameter, piece).copy_(values[piece.tensor][piece.box.slices()])


def random_values(module: nn.Module, *, seed: int = 5) -> dict[str, Tensor]:
    """A random tensor for each logical tensor of which the module holds a part."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        segment.tensor: segment.shape
        for parameter in module.parameters()
        for segment in placement_of(parameter).segments
    }
    return {n: torch.randn(shape, generator=generator) for n, shape in sorted(shapes.items())}
