"""This rank's part of the model and what runs it: config sections → stages, engine, executor.

The lower half of the composition root; build.py puts a trainer around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lite.config.batch import global_batch_size_at, num_microbatches
from megatron_lite.config.deepspeed import deepspeed_config
from megatron_lite.config.schema import RunConfig
from megatron_lite.engine.deepspeed_engine import ZeroEngine
from megatron_lite.engine.interface import Engine
from megatron_lite.engine.zero3_engine import Zero3Engine
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.stopping import StopRequest
from megatron_lite.health.time_limit import TimeLimit
from megatron_lite.layers.context import LayerContext
from megatron_lite.layers.deferred import WeightGradients
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.random import RngStreams
from megatron_lite.pipeline.executor import Note, PipelineExecutor
from megatron_lite.pipeline.p2p import connect
from megatron_lite.pipeline.partition import partition_layers
from megatron_lite.pipeline.plan import SchedulePlan

Stages = dict[int, GPTStage]
"""A rank's parts of the model by number of their stage."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """Where this process runs: its groups, device and the folder of the run."""

    groups: ProcessGroups
    device: torch.device
    run_dir: Path
    stop: StopRequest = field(default_factory=StopRequest)
    time_limit: TimeLimit = field(default_factory=TimeLimit)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    node: str = ""
    """What people call this machine."""


def build_grid(config: RunConfig, *, rank: int, world_size: int) -> Grid:
    """The grid of a run; the data-parallel size is what the world leaves."""
    tp = config.parallel.tensor_model_parallel_size
    pp = config.parallel.pipeline_model_parallel_size
    dp = world_size // (tp * pp)
    plan = build_plan(config, dp)
    return Grid(
        tp_size=tp,
        dp_size=dp,
        pp_size=pp,
        rank=rank,
        bidirectional=plan.bidirectional,
        ends=plan.ends,
    )


def build_plan(config: RunConfig, dp: int) -> SchedulePlan:
    """Where the model's stages are, and the tables that run them."""
    training = config.training
    first = global_batch_size_at(training, 0)
    return SchedulePlan.of(
        config.parallel.pipeline_schedule,
        num_ranks=config.parallel.pipeline_model_parallel_size,
        num_microbatches=num_microbatches(first, training.micro_batch_size, dp),
        virtual=config.parallel.virtual_pipeline_model_parallel_size,
    )


def build_context(
    config: RunConfig,
    place: Place,
    streams: RngStreams,
    weight_gradients: WeightGradients | None = None,
) -> LayerContext:
    """What the layers of this rank are made with."""
    return LayerContext(
        group=place.groups.tensor,
        device=place.device,
        dtype=DTYPES[config.precision.dtype],
        seed=config.training.seed,
        sequence_parallel=config.parallel.sequence_parallel,
        streams=streams,
        weight_gradients=weight_gradients,
        gradients_apart=_accumulates_in_fp32(config),
    )


def _accumulates_in_fp32(config: RunConfig) -> bool:
    """Whether 16-bit gradients are added up by us, and in float32; ZeRO-3 adds up by itself."""
    ours = config.deepspeed.zero_optimization.stage != 3
    return ours and config.precision.accumulate_grads_in_fp32 and config.precision.dtype != "fp32"


def build_stages(
    config: RunConfig, context: LayerContext, plan: SchedulePlan, grid: Grid, *, vocab_size: int
) -> Stages:
    """This rank's parts of the model, with their first weights."""
    layout = config.parallel.pipeline_model_parallel_layout
    layers = partition_layers(config.model.num_layers, plan.num_stages, layout)
    stages: Stages = {}
    for number in plan.stages_of(grid.pp_rank):
        stages[number] = GPTStage(
            config.model,
            context,
            layers=layers[number],
            vocab_size=vocab_size,
            first=number == 0,
            last=number == plan.num_stages - 1,
            training=config.training,
            embedding=stages[0].embedding.word_embeddings if 0 in stages else None,
        )
    if config.training.compile:
        for stage in stages.values():
            for layer in stage.layers:
                layer.compile()
    return stages


def build_engine(
    config: RunConfig,
    place: Place,
    stages: Stages,
    weight_gradients: WeightGradients | None = None,
) -> Engine:
    """The ZeRO engine of the configured stage around this rank's parts of the model."""
    groups, optimizer = place.groups, config.optimizer
    common: dict[str, Any] = {
        "deepspeed_config": deepspeed_config(config, groups.gradient.size),
        "adam": {
            "lr": optimizer.lr,
            "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
            "eps": optimizer.adam_eps,
        },
        "weight_decay": optimizer.weight_decay,
        "groups": groups,
    }
    if config.deepspeed.zero_optimization.stage == 3:
        (stage,) = stages.values()
        return Zero3Engine(stage, **common)
    return ZeroEngine(
        stages,
        accumulate_in_fp32=_accumulates_in_fp32(config),
        shared=_tied_tables(config, stages),
        weight_gradients=weight_gradients,
        **common,
    )


def _tied_tables(config: RunConfig, stages: Stages) -> Sequence[nn.Parameter]:
    """The table that a tied head on another rank shares with the embedding."""
    first = any(stage.first for stage in stages.values())
    last = [stage for stage in stages.values() if stage.last]
    if config.model.untie_embeddings_and_output_weights or (first and last):
        return ()
    if first:
        return (stages[0].embedding.word_embeddings.weight,)
    if last:
        assert last[0].head.table is not None
        return (last[0].head.table.weight,)
    return ()


def build_executor(
    config: RunConfig, place: Place, engine: Engine, plan: SchedulePlan, *, note: Note
) -> PipelineExecutor:
    """The executor of this rank, its channels open."""
    connect(place.groups, place.device, plan.neighbours)
    return PipelineExecutor(
        place.groups,
        engine,
        dtype=DTYPES[config.precision.dtype],
        device=place.device,
        note=note,
    )
