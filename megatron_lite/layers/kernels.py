"""Which implementation of a norm is used: NVIDIA apex's fused kernels where installed, or torch's.

PyPI's package named `apex` is another program; NVIDIA's is known by what it contains. Called when
norms are created, and once at the start of a run to say what is active.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

NormFunction = Callable[[Tensor, tuple[int, ...], Tensor, Tensor | None, float], Tensor]
"""(x, normalised shape, weight, bias, epsilon) → normalised x."""

_APEX_EXTENSION = "fused_layer_norm_cuda"


def apex_status() -> str:
    """The word "active", or why apex is not used."""
    spec = find_spec("apex")
    if spec is None:
        return "not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "normalization" / "fused_layer_norm.py").is_file() for folder in folders):
        return "the installed package named apex is not NVIDIA's"
    if find_spec(_APEX_EXTENSION) is None:
        return f"installed without its CUDA extension {_APEX_EXTENSION}"
    return "active"


def norm_function(kind: str, device: torch.device) -> NormFunction:
    """The function behind a "LayerNorm" or "RMSNorm" on a device."""
    if device.type == "cuda" and apex_status() == "active":
        return _apex_layer_norm if kind == "LayerNorm" else _apex_rms_norm
    return F.layer_norm if kind == "LayerNorm" else _rms_norm


def describe_kernels(device: torch.device) -> str:
    """A line for the start of a run."""
    if device.type != "cuda":
        return " kernels: torch's for the CPU |"
    status = apex_status()
    norms = "apex's fused" if status == "active" else f"torch's (apex: {status})"
    return f" kernels: attention torch's SDPA | norms {norms} |"


def _rms_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, epsilon: float
) -> Tensor:
    return F.rms_norm(x, shape, weight, epsilon)


def _apex_layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, epsilon: float
) -> Tensor:
    apex = import_module("apex.normalization.fused_layer_norm")
    out: Tensor = apex.fused_layer_norm_affine(x, weight, bias, shape, epsilon)
    return out


def _apex_rms_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, epsilon: float
) -> Tensor:
    apex = import_module("apex.normalization.fused_layer_norm")
    out: Tensor = apex.fused_rms_norm_affine(x, weight, shape, epsilon)
    return out
