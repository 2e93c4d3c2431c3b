"""Saving and loading: keys that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config.errors import Problem, show
from megatron_lite.config.rules.common import Rule, without_effect
from megatron_lite.config.schema import CheckpointConfig, RunConfig

LOADING = (
    "ckpt_step",
    "verify_on_load",
    "fall_back_to_older",
    "finetune",
    "no_load_optim",
    "no_load_rng",
    "strict",
    "changed_data",
)


def saving_has_a_folder(cfg: RunConfig) -> Iterator[Problem]:
    """When and how much to save means nothing without a place."""
    if cfg.checkpoint.save is None:
        names, why = ("save_interval", "keep_last", "async_save"), "without checkpoint.save"
        yield from without_effect(cfg.checkpoint, CheckpointConfig, names, "checkpoint", why)


def loading_has_a_folder(cfg: RunConfig) -> Iterator[Problem]:
    """What to load means nothing without a place."""
    if cfg.checkpoint.load is not None:
        return
    why = "without checkpoint.load"
    yield from without_effect(cfg.checkpoint, CheckpointConfig, LOADING, "checkpoint", why)
    if cfg.checkpoint.exit_on_missing_checkpoint:
        path = "checkpoint.exit_on_missing_checkpoint"
        yield Problem(path, True, f"has no effect {why}", "leave it out")


def loading_is_unambiguous(cfg: RunConfig) -> Iterator[Problem]:
    """A new run from weights loads no optimizer, streams or position anyway; a step is exact."""
    checkpoint = cfg.checkpoint
    if checkpoint.finetune:
        unread: tuple[str, ...] = ("no_load_optim", "no_load_rng", "changed_data")
        why = "with checkpoint.finetune"
        yield from without_effect(checkpoint, CheckpointConfig, unread, "checkpoint", why)
    if checkpoint.ckpt_step is not None:
        unread, why = ("fall_back_to_older",), "beside checkpoint.ckpt_step"
        yield from without_effect(checkpoint, CheckpointConfig, unread, "checkpoint", why)


def a_requeued_job_goes_on(cfg: RunConfig) -> Iterator[Problem]:
    """It must find what it saved, and its first start finds nothing."""
    if cfg.launch.requeue:
        yield from goes_on_from_what_it_saved(cfg, "launch.requeue")


def goes_on_from_what_it_saved(cfg: RunConfig, option: str) -> Iterator[Problem]:
    """What `option` demands; launch/submit.py asks this for jobs that follow one another."""
    save, load = cfg.checkpoint.save, cfg.checkpoint.load
    if save is None or load != save:
        rule = f"must be what {option} would go on from: checkpoint.save is {show(save)}"
        yield Problem("checkpoint.load", load, rule, f"set both to {show(save or 'checkpoints')}")
    elif cfg.checkpoint.exit_on_missing_checkpoint:
        path = "checkpoint.exit_on_missing_checkpoint"
        yield Problem(path, True, f"would refuse the first start of {option}", "use false")


def states_can_be_read(cfg: RunConfig) -> Iterator[Problem]:
    """DeepSpeed reads nvme into buffers that it may use again; saving what was there is untried."""
    zero = cfg.deepspeed.zero_optimization
    for key, what in (("offload_optimizer", "optimizer states"), ("offload_param", "weights")):
        if getattr(zero, key).device != "nvme":
            continue
        for name in ("save", "load"):
            folder = getattr(cfg.checkpoint, name)
            if folder is not None:
                rule = f"checkpoints of {what} on nvme are not supported"
                nearest = f'leave it out, or use "device": "cpu" in {key}'
                yield Problem(f"checkpoint.{name}", folder, rule, nearest)


RULES: tuple[Rule, ...] = (
    saving_has_a_folder,
    loading_has_a_folder,
    loading_is_unambiguous,
    a_requeued_job_goes_on,
    states_can_be_read,
)
