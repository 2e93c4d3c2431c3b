"""Which pipeline stage of a Megatron-LM checkpoint holds each logical tensor, under what name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.convert import megatron_names
from megatron_lite.convert.foreign import refuse
from megatron_lite.convert.target import Target
from megatron_lite.layers.embedding import WORD_EMBEDDINGS

VOCABULARY = (WORD_EMBEDDINGS, "output_layer.weight")
"""Cut and padded along the vocabulary."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A pipeline stage: each tensor rank's tensors by flattened name, and its layers."""

    ranks: tuple[Mapping[str, Tensor], ...]
    layers: range
    paths: tuple[Path, ...]


Sources = dict[str, tuple[Stage, str]]


def make_stages(grid: list[list[Path]], files: list[list[dict[str, Any]]]) -> list[Stage]:
    """Each stage with the numbers in the whole model of its layers."""
    stages, first = [], 0
    for paths, contents in zip(grid, files, strict=True):
        for path, content in zip(paths, contents, strict=True):
            if not isinstance(content.get("model"), Mapping):
                raise CheckpointError(
                    f"{path}: has no dictionary `model`; of an interleaved schedule (model0, …) "
                    "save it without virtual stages first"
                )
        ranks = tuple(megatron_names.flatten(content["model"]) for content in contents)
        layers = range(first, first + megatron_names.count_layers(ranks[0]))
        stages.append(Stage(ranks, layers, tuple(paths)))
        first = layers.stop
    return stages


def find_sources(folder: Path, stages: Sequence[Stage], target: Target) -> Sources:
    """Which stage holds each logical tensor, and under what name.

    CheckpointError naming all tensors that are missing, superfluous or of a wrong shape.
    """
    found: Sources = {}
    fused: dict[tuple[Stage, str], list[str]] = {}
    for tensor in target.table:
        for stage in stages:
            name = megatron_names.find(stage.ranks[0], tensor, first_layer=stage.layers.start)
            if name is not None and tensor not in found:
                found[tensor] = (stage, name)
                fused.setdefault((stage, name), []).append(tensor)
    lines = [f"{tensor}: missing" for tensor in target.table if tensor not in found]
    tied = not target.model.untie_embeddings_and_output_weights
    lines += _superfluous(stages, found, tied=tied)
    for (stage, name), tensors in fused.items():
        lines += _wrong_shapes(stage, name, tensors, target)
    refuse(f"{folder} does not hold the model of the config; correct its model section", lines)
    return found


def _superfluous(stages: Sequence[Stage], found: Sources, *, tied: bool) -> list[str]:
    """A line for each tensor that no logical one is read from."""
    used, lines = set(found.values()), []
    for stage in stages:
        for name in stage.ranks[0]:
            if (stage, name) in used:
                continue
            if tied and stage is stages[-1] and name in megatron_names.TIED_COPIES:
                lines += _untied(stage, name, found)
            else:
                lines.append(f"{stage.paths[0].parent.name}: {name} is superfluous")
    return lines


def _untied(last: Stage, name: str, found: Sources) -> list[str]:
    """A line for each rank whose head is not the last stage's copy of a tied embedding."""
    if WORD_EMBEDDINGS not in found:  # which is told already
        return []
    first, embedding = found[WORD_EMBEDDINGS]
    return [
        f"{path.parent.name}: {name} is no copy of {embedding}, so the head is not tied; set "
        "model.untie_embeddings_and_output_weights"
        for path, own, other in zip(last.paths, last.ranks, first.ranks, strict=True)
        if last is first or name not in own or not torch.equal(own[name], other[embedding])
    ]


def _wrong_shapes(stage: Stage, name: str, tensors: Sequence[str], target: Target) -> list[str]:
    """A line for each rank whose shard of `tensors`, fused into one, has another shape."""
    parts = [target.table[tensor] for tensor in tensors]
    shape = [sum(part.shape[0] for part in parts), *parts[0].shape[1:]]
    cut, size = parts[0].cut, len(stage.ranks)
    wanted = [n // size if cut and d == cut.dim else n for d, n in enumerate(shape)]
    lines = []
    for path, rank in zip(stage.paths, stage.ranks, strict=True):
        seen = list(rank[name].shape) if name in rank else []
        fits = seen == wanted
        if tensors[0] in VOCABULARY:  # how far Megatron pads it depends on its tensor size
            fits = seen[1:] == wanted[1:] and seen[0] * size >= shape[0]
        if not fits:
            lines.append(f"{path.parent.name}: {name} has shape {seen}, not {wanted}")
    return lines
