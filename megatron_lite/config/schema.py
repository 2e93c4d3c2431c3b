"""The whole of a run's configuration: ten sections, each with a file of its own in `sections/`.

Types and bounds of single fields only; rules that join fields are in `rules/`, reading and
composing in `load`.
"""

from __future__ import annotations

from megatron_lite.config.fields import Section
from megatron_lite.config.sections.checkpoint import CheckpointConfig
from megatron_lite.config.sections.data import DataConfig
from megatron_lite.config.sections.deepspeed import (
    Aio,
    CommsLogger,
    DeepSpeedSection,
    OffloadOptimizer,
    OffloadParam,
    ZeroOptimization,
)
from megatron_lite.config.sections.launch import LaunchConfig
from megatron_lite.config.sections.logging import LoggingConfig
from megatron_lite.config.sections.model import ModelConfig
from megatron_lite.config.sections.optimizer import LrBatchScaling, OptimizerConfig
from megatron_lite.config.sections.parallel import ParallelConfig
from megatron_lite.config.sections.precision import PrecisionConfig
from megatron_lite.config.sections.training import LossSpike, TrainingConfig

__all__ = [
    "Aio",
    "CheckpointConfig",
    "CommsLogger",
    "DataConfig",
    "DeepSpeedSection",
    "LaunchConfig",
    "LoggingConfig",
    "LossSpike",
    "LrBatchScaling",
    "ModelConfig",
    "OffloadOptimizer",
    "OffloadParam",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "TrainingConfig",
    "ZeroOptimization",
]


class RunConfig(Section):
    """The configuration of one run."""

    model: ModelConfig
    """Shape of the network."""

    parallel: ParallelConfig = ParallelConfig()
    """How the model is cut over ranks."""

    training: TrainingConfig
    """Batches, length, evaluation, recomputation."""

    optimizer: OptimizerConfig
    """AdamW and its learning rate."""

    precision: PrecisionConfig = PrecisionConfig()
    """Number formats and loss scale."""

    deepspeed: DeepSpeedSection = DeepSpeedSection()
    """ZeRO and its offload, in DeepSpeed's own words."""

    data: DataConfig = DataConfig()
    """Corpora and tokenizer."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, what to load."""

    logging: LoggingConfig = LoggingConfig()
    """What is reported, and how often."""

    launch: LaunchConfig = LaunchConfig()
    """The machines the run asks for."""
