"""Target: the run that a foreign checkpoint is imported for, and its table of logical tensors.

The table is read off the model itself, so a converted checkpoint has the names, shapes and cuts
that training writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.load import ConfigError, LoadedConfig, load_config
from megatron_lite.config.schema import DataConfig, ModelConfig
from megatron_lite.data.errors import DataError
from megatron_lite.data.tokenizer import named_tokenizer
from megatron_lite.layers.context import Init, LayerContext, placement_of
from megatron_lite.layers.embedding import WORD_EMBEDDINGS
from megatron_lite.models.gpt import GPTStage
from megatron_lite.sharding.placement import Placement
from megatron_lite.sharding.plan import LogicalTensor

T = TypeVar("T")
Table = dict[str, LogicalTensor]


@dataclass(frozen=True)
class Target:
    """A checked run config and the logical tensors of its model."""

    path: Path
    loaded: LoadedConfig
    table: Table

    @property
    def model(self) -> ModelConfig:
        """The model section."""
        return self.loaded.config.model

    @property
    def vocab_size(self) -> int:
        """Token ids of the vocabulary."""
        return self.table[WORD_EMBEDDINGS].shape[0]

    @classmethod
    def read(cls, path: Path) -> Target:
        """Load a run config; CheckpointError with all its faults where it is refused."""
        loaded = _told(path, lambda: load_config(path))
        config = loaded.config
        size = _told(path, lambda: vocab_size(config.model, config.data))
        return cls(path, loaded, logical_tensors(config.model, vocab_size=size))


def vocab_size(model: ModelConfig, data: DataConfig) -> int:
    """Token ids of the vocabulary: the config's number, or else the tokenizer's."""
    if model.vocab_size is not None:
        return model.vocab_size
    return named_tokenizer(data).vocab_size


def logical_tensors(model: ModelConfig, *, vocab_size: int) -> Table:
    """The logical tensors of a model, sorted by name, from a model that has no values."""
    stage = GPTStage(
        model,
        _Outline(device=torch.device("meta")),
        layers=range(model.num_layers),
        vocab_size=vocab_size,
    )
    segments = (s for p in stage.parameters() for s in placement_of(p).segments)
    table = {s.tensor: LogicalTensor(s.shape, s.cut) for s in segments}
    return dict(sorted(table.items()))


class _Outline(LayerContext):
    """Makes parameters that know their place and take no memory."""

    def parameter(
        self, placement: Placement, init: Init, *, partial_grad: bool = False
    ) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(placement.shape, device=self.device))
        parameter.placement = placement  # type: ignore[attr-defined]
        parameter.partial_grad = partial_grad  # type: ignore[attr-defined]
        return parameter


def _told(path: Path, work: Callable[[], T]) -> T:
    """Run and turn a fault of the config into a CheckpointError that names its file."""
    try:
        return work()
    except (ConfigError, DataError) as error:
        raise CheckpointError(f"{path}: {error}") from error
