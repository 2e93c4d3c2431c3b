"""Which parameters decay: matrices do, biases and norms don't (as in Megatron and GPT-3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Each parameter once, in order of first appearance."""
    return list(dict.fromkeys(parameters))


def parameters_of(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """Those of a rank's stages, each once: a tied head shares the table of an embedding."""
    return unique(p for stage in stages.values() for p in stage.parameters())


def split_by_decay(parameters: Sequence[nn.Parameter]) -> tuple[list[int], list[int]]:
    """Indices of the parameters that decay (two or more dims), and of the others."""
    decay = [i for i, p in enumerate(parameters) if p.dim() >= 2]
    return decay, [i for i, p in enumerate(parameters) if p.dim() < 2]


def param_groups(
    parameters: Sequence[nn.Parameter], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Two optimizer groups, decaying first. Every rank must have both: norms are summed group by
    group over the model-parallel ranks, so a rank with one group less would hang the others."""
    decay, rest = split_by_decay(parameters)
    if not decay or not rest:
        raise ValueError("a pipeline stage needs at least one layer: it has no matrix or no norm")
    return [
        {"params": [parameters[i] for i in decay], "weight_decay": weight_decay},
        {"params": [parameters[i] for i in rest], "weight_decay": 0.0},
    ]
