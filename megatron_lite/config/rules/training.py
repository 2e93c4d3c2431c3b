"""Batches, length of the run, recomputation and the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config import batch
from megatron_lite.config.errors import NO_VALUE, Problem
from megatron_lite.config.rules.common import (
    Rule,
    WorldRule,
    data_parallel_size,
    nearest_multiples,
    without_effect,
)
from megatron_lite.config.rules.pipeline import num_stages
from megatron_lite.config.schema import OptimizerConfig, RunConfig, TrainingConfig


def length_is_given_once(cfg: RunConfig) -> Iterator[Problem]:
    """The run's length is told in iterations or in samples."""
    iterations, samples = cfg.training.train_iters, cfg.training.train_samples
    if iterations is None and samples is None:
        yield Problem("training.train_iters", NO_VALUE, "is required, or training.train_samples")
    if iterations is not None and samples is not None:
        rule = f"cannot stand beside training.train_samples {samples}"
        yield Problem("training.train_iters", iterations, rule, "keep one of them")


def ramp_up_reaches_goal(cfg: RunConfig) -> Iterator[Problem]:
    """The ramp-up ends at the global batch size in whole increments."""
    if fault := batch.rampup_fault(cfg.training):
        ramp = cfg.training.rampup_batch_size
        yield Problem("training.rampup_batch_size", ramp, f"is no way to the global batch: {fault}")


def samples_fill_a_batch(cfg: RunConfig) -> Iterator[Problem]:
    """train_samples holds at least one batch."""
    samples, first = cfg.training.train_samples, cfg.training.global_batch_size
    if ramp := cfg.training.rampup_batch_size:
        first = min(first, ramp[0])
    if samples is not None and samples < first:
        rule = f"must hold at least one batch of {first} samples"
        yield Problem("training.train_samples", samples, rule, f"use {first} or more")


def batches_divide(cfg: RunConfig, world_size: int) -> Iterator[Problem]:
    """Every batch, those of the ramp-up too, is a whole number of micro-batches on every rank."""
    dp = data_parallel_size(cfg, world_size)
    micro = cfg.training.micro_batch_size
    one, name = micro * dp, f"micro_batch_size x data-parallel size {micro} x {dp} = {micro * dp}"
    size = cfg.training.global_batch_size
    if size % one:
        nearest = f"use {nearest_multiples(size, one)}"
        yield Problem("training.global_batch_size", size, f"must be a multiple of {name}", nearest)
    if cfg.training.rampup_batch_size is None or batch.rampup_fault(cfg.training):
        return
    wrong = [s for s in batch.rampup_batch_sizes(cfg.training) if s % one]
    if wrong:
        rule = f"every batch on the way must be a multiple of {name}; {wrong[0]} is not"
        nearest = f"let start and increment be multiples of {one}"
        ramp = cfg.training.rampup_batch_size
        yield Problem("training.rampup_batch_size", ramp, rule, nearest)


def recomputation_is_whole(cfg: RunConfig) -> Iterator[Problem]:
    """Method and number of layers belong to full recomputation, and fit on a stage."""
    training = cfg.training
    if training.recompute_granularity != "full":
        names = ("recompute_method", "recompute_num_layers")
        why = 'without "recompute_granularity": "full"'
        yield from without_effect(training, TrainingConfig, names, "training", why)
        return
    layout = cfg.parallel.pipeline_model_parallel_layout
    largest = max(layout) if layout else -(-cfg.model.num_layers // num_stages(cfg))
    if training.recompute_num_layers > largest:
        rule = f"must be at most the layers of a stage, {largest}"
        path = "training.recompute_num_layers"
        yield Problem(path, training.recompute_num_layers, rule, f"use {largest}")


def rewinds_have_a_checkpoint(cfg: RunConfig) -> Iterator[Problem]:
    """Going back needs checkpoints to go back to, and nothing else reads how."""
    training, spike = cfg.training, cfg.training.loss_spike
    asking: list[tuple[str, str]] = [("training.on_nan", training.on_nan)]
    if spike is not None:
        asking.append(("training.loss_spike.action", spike.action))
    asking = [(path, action) for path, action in asking if action == "rewind"]
    if not asking:
        names = ("rewind_batches", "max_rewinds")
        why = 'without "rewind" in training.on_nan or training.loss_spike.action'
        yield from without_effect(training, TrainingConfig, names, "training", why)
    for path, action in asking:
        if cfg.checkpoint.save is None:
            yield Problem(path, action, "needs checkpoint.save", "set it, or use stop")
        elif not cfg.checkpoint.save_interval:
            rule = "needs checkpoints on the way: checkpoint.save_interval is 0"
            yield Problem(path, action, rule, "set it to 1 or more")


def learning_rate_falls(cfg: RunConfig) -> Iterator[Problem]:
    """The decay ends below its start."""
    lr, min_lr = cfg.optimizer.lr, cfg.optimizer.min_lr
    if min_lr > lr:
        rule = f"must be at most optimizer.lr {lr:g}"
        yield Problem("optimizer.min_lr", min_lr, rule, f"use {lr:g} or less")


def warm_up_is_given_once(cfg: RunConfig) -> Iterator[Problem]:
    """Warm-up is told in iterations or as a fraction."""
    iterations, fraction = cfg.optimizer.lr_warmup_iters, cfg.optimizer.lr_warmup_fraction
    if iterations and fraction is not None:
        rule = f"cannot stand beside optimizer.lr_warmup_fraction {fraction:g}"
        yield Problem("optimizer.lr_warmup_iters", iterations, rule, "keep one of them")


def wsd_has_its_decay(cfg: RunConfig) -> Iterator[Problem]:
    """WSD, and WSD alone, has a final decay."""
    path, final = "optimizer.lr_wsd_decay_iters", cfg.optimizer.lr_wsd_decay_iters
    if cfg.optimizer.lr_decay_style != "WSD":
        why = 'without "lr_decay_style": "WSD"'
        names = ("lr_wsd_decay_iters",)
        yield from without_effect(cfg.optimizer, OptimizerConfig, names, "optimizer", why)
        return
    if final is None:
        yield Problem(path, NO_VALUE, 'is required with "lr_decay_style": "WSD"')
        return
    whole = cfg.optimizer.lr_decay_iters
    if final > whole:
        rule = f"must be at most optimizer.lr_decay_iters {whole}"
        yield Problem(path, final, rule, f"use {whole} or less")


RULES: tuple[Rule, ...] = (
    length_is_given_once,
    ramp_up_reaches_goal,
    samples_fill_a_batch,
    recomputation_is_whole,
    rewinds_have_a_checkpoint,
    learning_rate_falls,
    warm_up_is_given_once,
    wsd_has_its_decay,
)
WORLD_RULES: tuple[WorldRule, ...] = (batches_divide,)
