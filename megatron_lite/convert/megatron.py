"""Read the weights of Megatron-LM's legacy checkpoints, of any tensor × pipeline size.

A file a (tensor, pipeline) rank, with that rank's shards. The optimizer's states, whose order
depends on the run's buffers, are not read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import WEIGHT
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert import megatron_facts, megatron_layout, megatron_names, torch_files
from megatron_lite.convert.foreign import Foreign, existing, refuse, understood
from megatron_lite.convert.target import Target
from megatron_lite.layers.embedding import WORD_EMBEDDINGS
from megatron_lite.progress import Progress

POINTER = "latest_checkpointed_iteration.txt"
VERSION = 3.0
VOCABULARY = (WORD_EMBEDDINGS, "output_layer.weight")
"""Cut and padded along the vocabulary."""


@dataclass(frozen=True, eq=False)
class _Stage:
    """A pipeline stage: each tensor rank's tensors by flattened name, and its layers."""

    ranks: tuple[Mapping[str, Tensor], ...]
    layers: range
    paths: tuple[Path, ...]


def read(root: Path, target: Target, *, step: int | None = None) -> Foreign:
    """The weights of iteration `step`, or of the one that the pointer file names.

    CheckpointError where the folder is not whole, of another kind, or not of the config's model.
    """
    folder = find(root, step)
    with understood(folder, "Megatron-LM lays out checkpoint version 3.0"):
        return _read(folder, target)


def _read(folder: Path, target: Target) -> Foreign:
    grid = _grid(folder)
    files = [[torch_files.load(path) for path in stage] for stage in grid]
    facts = _facts(grid[0][0], files[0][0], target)
    stages = _stages(grid, files)
    sources = _sources(folder, stages, target)

    def read_one(tensor: str, state: str) -> Tensor:
        stage, name = sources[tensor]
        shards = [rank[name] for rank in stage.ranks]
        logical = target.table[tensor]
        return megatron_layout.merge(
            shards, tensor, logical, target.model, interleaved=facts.interleaved
        )

    position = Progress(
        iteration=facts.iteration, consumed_samples=facts.samples, updates=facts.iteration
    )
    scalars: dict[str, Any] = {"optimizer_step": 0, "loss_scaler": {}}
    return Foreign(folder, position, scalars, (WEIGHT,), read_one, facts.notes)


def find(root: Path, step: int | None) -> Path:
    """`<root>/iter_<step>`, or what the pointer file names (a number, or `release`)."""
    pointer = root / POINTER
    if step is None and not pointer.is_file():
        raise CheckpointError(f"{pointer}: missing; name an iteration with --step")
    word = pointer.read_text().strip() if step is None else str(step)
    return existing(root / (f"iter_{int(word):07d}" if word.isdecimal() else word))


def _grid(folder: Path) -> list[list[Path]]:
    """The files, by pipeline stage and tensor rank; every one that is missing is named."""
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    tp = next(t for t in count() if not names & {f"mp_rank_{t:02d}", f"mp_rank_{t:02d}_000"})
    if tp == 0:
        raise CheckpointError(f"{folder}: has no mp_rank_00; not a legacy Megatron checkpoint")
    if "mp_rank_00" in names:
        folders = [[f"mp_rank_{t:02d}" for t in range(tp)]]
    else:
        pp = next(p for p in count() if f"mp_rank_00_{p:03d}" not in names)
        folders = [[f"mp_rank_{t:02d}_{p:03d}" for t in range(tp)] for p in range(pp)]
    grid = [[folder / name / "model_optim_rng.pt" for name in stage] for stage in folders]
    missing = [str(path.relative_to(folder)) for stage in grid for path in stage]
    missing = [name for name in missing if not (folder / name).is_file()]
    refuse(f"{folder}: files are missing", missing)
    return grid


@dataclass(frozen=True)
class _Facts:
    """What the first file says of the run."""

    iteration: int
    samples: int
    interleaved: bool
    """RoPE pairs neighbouring channels of a head."""
    notes: list[str]


def _facts(path: Path, content: Mapping[str, Any], target: Target) -> _Facts:
    version = content.get("checkpoint_version", 0)
    if version != VERSION:
        raise CheckpointError(
            f"{path}: checkpoint_version is {version}; only {VERSION} is read, since older ones "
            "order query, key and value differently. Load and save it with a newer Megatron-LM"
        )
    args = content.get("args")
    notes = ["only weights are converted; resume with checkpoint.finetune or no_load_optim"]
    if isinstance(args, Namespace):
        megatron_facts.check(path, args, target)
        if not target.model.swiglu and getattr(args, "bias_gelu_fusion", True) is False:
            notes.append("bias_gelu_fusion is off there: GELU was exact, here it is its tanh form")
    else:
        notes.append("the checkpoint keeps no arguments: heads, RoPE and epsilon are unchecked")
        args = Namespace()
    iteration = content.get("iteration")  # a released model has a word there, or nothing
    return _Facts(
        iteration if isinstance(iteration, int) else 0,
        int(getattr(args, "consumed_train_samples", 0) or 0),
        bool(getattr(args, "rotary_interleaved", False)),
        notes,
    )


def _stages(grid: list[list[Path]], files: list[list[dict[str, Any]]]) -> list[_Stage]:
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
        stages.append(_Stage(ranks, layers, tuple(paths)))
        first = layers.stop
    return stages


def _sources(
    folder: Path, stages: Sequence[_Stage], target: Target
) -> dict[str, tuple[_Stage, str]]:
    """Which stage holds each logical tensor, and under what name.

    CheckpointError naming all tensors that are missing, superfluous or of a wrong shape.
    """
    found: dict[str, tuple[_Stage, str]] = {}
    fused: dict[tuple[_Stage, str], list[str]] = {}
    for tensor in target.table:
        for stage in stages:
            name = megatron_names.find(stage.ranks[0], tensor, first_layer=stage.layers.start)
            if name is not None and tensor not in found:
                found[tensor] = (stage, name)
                fused.setdefault((stage, name), []).append(tensor)
    lines = [f"{tensor}: missing" for tensor in target.table if tensor not in found]
    lines += _superfluous(stages, fused.keys(), target.model)
    for (stage, name), tensors in fused.items():
        lines += _wrong_shapes(stage, name, tensors, target)
    refuse(f"{folder} does not hold the model of the config; correct its model section", lines)
    return found


def _superfluous(
    stages: Sequence[_Stage], used: Collection[tuple[_Stage, str]], model: ModelConfig
) -> list[str]:
    """Tensors that no logical one is read from, but a tied head's copy of the embedding."""
    copies = () if model.untie_embeddings_and_output_weights else megatron_names.TIED_COPIES
    return [
        f"{stage.paths[0].parent.name}: {name} is superfluous"
        for stage in stages
        for name in stage.ranks[0]
        if (stage, name) not in used and not (stage is stages[-1] and name in copies)
    ]


def _wrong_shapes(stage: _Stage, name: str, tensors: Sequence[str], target: Target) -> list[str]:
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
