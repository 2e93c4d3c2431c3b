"""Rotary position embedding (Su et al., arXiv:2104.09864) in the half-split pairing of GPT-NeoX.

Dimension i is paired with i + r/2, r being the rotated part of a head: LLaMA in Hugging Face's
layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def rotary_tables(
    positions: int, rotary_dim: int, *, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, rotary_dim / 2], of position × base^(−2i/rotary_dim)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    angle = torch.outer(torch.arange(positions, device=device).float(), base**-exponent)
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, s, heads, d] by its position; cos and sin are [s, r / 2], r ≤ d, for positions
    along s, or [b, s, r / 2] for positions of every token's own."""
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    if torch.compiler.is_compiling():
        # The compiler fuses the plain formula, and its gradient, into one pass over x.
        return _rotate_plainly(x, cos, sin)
    return _Rotate.apply(x, cos, sin)


def _rotate_plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class _Rotate(Function):
    """A rotation's gradient is the rotation back, so nothing of x has to be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
