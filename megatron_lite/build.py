"""Composition root: config sections → objects. The one file that may import every package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from megatron_lite.build_model import (
    Place,
    Stages,
    build_context,
    build_engine,
    build_executor,
    build_plan,
    build_stages,
)
from megatron_lite.checkpoint.save import require_room
from megatron_lite.config.batch import num_microbatches
from megatron_lite.config.load import resolved_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.boundaries import Boundaries
from megatron_lite.data.build import Datasets, build_datasets
from megatron_lite.data.errors import DataError
from megatron_lite.data.loader import MicroBatch, micro_batches
from megatron_lite.data.sampler import evaluation_batches
from megatron_lite.data.source import SampleSource
from megatron_lite.data.tokenizer import named_tokenizer
from megatron_lite.data.tokenizer_base import Tokenizer
from megatron_lite.data.training_order import TrainingOrder
from megatron_lite.engine.interface import Engine
from megatron_lite.engine.measures import Measures
from megatron_lite.engine.param_groups import parameters_of
from megatron_lite.forensics import Forensics
from megatron_lite.guard import Guard
from megatron_lite.layers.context import placement_of
from megatron_lite.layers.deferred import WeightGradients
from megatron_lite.layers.kernels import describe_kernels
from megatron_lite.monitoring.profiler import Profiler
from megatron_lite.monitoring.stragglers import DeviceStopwatch, HostStopwatch, WorkClock
from megatron_lite.monitoring.timers import StepTimer
from megatron_lite.mpu.random import RngStreams
from megatron_lite.mpu.reductions import together
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.executor import Note
from megatron_lite.pipeline.messages import Message
from megatron_lite.progress import Progress
from megatron_lite.report import Reporter, Speed
from megatron_lite.resume import Start, restore
from megatron_lite.rewinding import Rewinder
from megatron_lite.saving import Saver, in_the_way
from megatron_lite.stage_report import StageReport
from megatron_lite.trainer import Part, Trainer


def build_trainer(
    config: RunConfig, place: Place, *, origins: Mapping[str, str] | None = None
) -> Trainer:
    """Everything that one rank needs to train, with its checkpoint loaded.

    `origins` says where each value of the config was written, for the checkpoints that it saves.
    """
    with together(DataError):  # a file can be missing on one node alone
        tokenizer = build_run_tokenizer(config)
        vocab_size = config.model.vocab_size or tokenizer.vocab_size
        datasets = build_run_datasets(config, vocab_size=vocab_size)
    streams = RngStreams(place.device)
    streams.seed(config.training.seed, place.groups.grid)
    plan = build_plan(config, place.groups.data.size)
    weight_gradients = WeightGradients() if plan.sample.split_backward else None
    context = build_context(config, place, streams, weight_gradients)
    stages = build_stages(config, context, plan, place.groups.grid, vocab_size=vocab_size)
    if config.checkpoint.save is not None and config.launch.preflight != "off":
        written = parameters_of(stages) if place.groups.gradient.rank == 0 else ()
        require_room(place.run_dir / config.checkpoint.save, map(placement_of, written))
    engine = build_engine(config, place, stages, weight_gradients)
    started = perf_counter()
    place.heartbeat.at("loading")
    resolved = resolved_dict(config)
    start = restore(
        config,
        resolved,
        root=_in_run(place, config.checkpoint.load),
        grid=place.groups.grid,
        engine=engine,
        streams=streams,
    )
    loading = perf_counter() - started
    place.heartbeat.at("start-up", "the first micro-batches")
    order = TrainingOrder.of(datasets.train, start.progress, config.data.skip_samples)
    report = Reporter(
        config,
        run_dir=place.run_dir,
        progress=start.progress,
        speed=Speed.of(
            config,
            vocab_size=vocab_size,
            world_size=place.groups.grid.world_size,
            device=_device_name(place.device),
        ),
        stages=StageReport(plan, place.groups.grid, place.device, config.training.micro_batch_size),
        rank=place.groups.grid.rank,
        device=place.device,
    )
    report.say(describe_run(config, place, stages))
    report.say(describe_kernels(place.device))
    cuda = place.device.type == "cuda"
    timer = StepTimer(work=WorkClock(DeviceStopwatch() if cuda else HostStopwatch()))
    save_root = _in_run(place, config.checkpoint.save)
    for line in [*start.lines, *in_the_way(save_root, start.progress)]:
        report.say(line)
    if start.bytes:
        report.checkpoint("load", start.progress, seconds=loading, size=start.bytes)
    return Trainer(
        config=config,
        resolved=resolved,
        origins=origins or {},
        groups=place.groups,
        node=place.node,
        engine=engine,
        executor=build_executor(config, place, engine, plan, note=_tell(place, timer.work)),
        plan=plan,
        streams=streams,
        order=order,
        train_batches=training_data(config, place, order, tokenizer, start.progress),
        evaluations=evaluation_data(config, place, datasets, tokenizer),
        report=report,
        progress=start.progress,
        saver=Saver(
            config.checkpoint,
            save_root,
            timer=timer,
            report=report,
            device=place.device,
        ),
        guard=build_guard(config, place, engine, streams),
        rewinder=Rewinder(
            config=config,
            resolved=resolved,
            grid=place.groups.grid,
            engine=engine,
            streams=streams,
            dataset=datasets.train,
            batches=lambda order, at: training_data(config, place, order, tokenizer, at),
            save_root=save_root,
            load_root=_in_run(place, config.checkpoint.load),
            loaded=_loaded_whole(config, start),
        ),
        timer=timer,
        device=place.device,
        stop=place.stop,
        time_limit=place.time_limit,
        heartbeat=place.heartbeat,
        measures=Measures(config.logging, engine, place.device),
        profiler=Profiler(config.logging, place.run_dir / "profile", rank=place.groups.grid.rank),
    )


def build_guard(config: RunConfig, place: Place, engine: Engine, streams: RngStreams) -> Guard:
    """The watch over losses and gradients."""
    forensics = Forensics(
        place.groups,
        engine,
        streams,
        folder=place.run_dir / "nonfinite",
        micro_batch_size=config.training.micro_batch_size,
        node=place.node,
    )
    return Guard(config, place.groups, engine, forensics, place.device)


def _loaded_whole(config: RunConfig, start: Start) -> int | None:
    """Iteration of the checkpoint that a run goes on from; None where it takes weights at most."""
    alone = config.checkpoint.finetune or config.checkpoint.no_load_optim
    return start.progress.iteration if start.bytes and not alone else None


def describe_run(config: RunConfig, place: Place, stages: Stages) -> str:
    """Layout, precision and size in a line for the start of a run."""
    grid, zero = place.groups.grid, config.deepspeed.zero_optimization
    held = sum(prod(placement_of(p).shape) for p in parameters_of(stages))
    offload = zero.offload_optimizer.device
    return (
        f" tensor {grid.tp_size} x pipeline {grid.pp_size} x data {grid.dp_size} | "
        f"{config.parallel.pipeline_schedule} | {config.precision.dtype} | ZeRO-{zero.stage}"
        f"{'' if offload == 'none' else f', optimizer on {offload}'} | "
        f"parameters on rank 0: {held / 1e6:.1f} M | device {place.device.type} |"
    )


def build_run_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of the data section."""
    data = config.data
    return named_tokenizer(data, vocab_size=config.model.vocab_size)


def build_run_datasets(config: RunConfig, *, vocab_size: int) -> Datasets:
    """The three parts; validation is required where the run evaluates."""
    required = ["train"]
    if config.training.eval_interval:
        required.append("valid")
    return build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        required=required,
        vocab_size=vocab_size,
    )


def _tell(place: Place, work: WorkClock) -> Note:
    """What the executor does, for the rank's heartbeat and, in training, its own work."""
    heartbeat, ranks = place.heartbeat, place.groups.pipeline.ranks

    def note(action: Action | None, message: Message | None) -> None:
        if heartbeat.phase == "forward-backward":
            if action is None:
                work.pause()
            elif message is None:
                work.begin((action.kind, action.stage))
            else:
                work.wait()
        if message is None:
            heartbeat.doing(action or "")
        else:
            heartbeat.doing(action, waits_for=ranks[message.src])

    return note


def training_data(
    config: RunConfig,
    place: Place,
    order: TrainingOrder,
    tokenizer: Tokenizer,
    progress: Progress,
) -> Iterator[MicroBatch]:
    """This replica's micro-batches without end, from where the run stands."""
    data = place.groups.data
    numbers = order.batches(
        progress.next_sample,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=data.rank,
        dp=data.size,
    )
    training = config.training
    in_a_step = num_microbatches(training.global_batch_size, training.micro_batch_size, data.size)
    # All of the next step's and some of the one after: a step takes its micro-batches at once.
    ahead = in_a_step + in_a_step // 2 + 2
    return _read(config, order.dataset, numbers, tokenizer, ahead=ahead)


def evaluation_data(
    config: RunConfig, place: Place, datasets: Datasets, tokenizer: Tokenizer
) -> dict[Part, Callable[[], Iterator[MicroBatch]]]:
    """The same samples at every evaluation: the first ones of the part, each once.

    At most `eval_iters` global batches, and never more than one epoch of the part.
    """
    training, data = config.training, place.groups.data

    def reader(dataset: Any) -> Callable[[], Iterator[MicroBatch]]:
        count = dataset.samples_per_epoch
        if training.eval_iters is not None:
            count = min(count, training.eval_iters * training.global_batch_size)
        numbers = evaluation_batches(
            count,
            micro_batch_size=training.eval_micro_batch_size,
            dp_rank=data.rank,
            dp=data.size,
        )
        # The trainer takes four a stage at a time.
        ahead = 4 * place.groups.pipeline.size
        return lambda: _read(config, dataset, numbers, tokenizer, ahead=ahead)

    if not training.eval_interval:
        return {}
    parts: dict[Part, Any] = {"valid": datasets.valid, "test": datasets.test}
    return {part: reader(dataset) for part, dataset in parts.items() if dataset is not None}


def _read(
    config: RunConfig, dataset: SampleSource, numbers: Any, tokenizer: Tokenizer, *, ahead: int
) -> Iterator[MicroBatch]:
    return micro_batches(
        dataset,
        numbers,
        num_workers=config.data.num_workers,
        ahead=ahead,
        boundaries=Boundaries(
            eod=tokenizer.eod,
            eod_mask_loss=config.data.eod_mask_loss,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
            packed=config.data.sft,
        ),
    )


def _in_run(place: Place, folder: str | None) -> Path | None:
    return None if folder is None else place.run_dir / folder


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
