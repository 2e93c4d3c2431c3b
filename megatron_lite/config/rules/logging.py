"""What is reported: curves, histograms, traces."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_lite.config.draft import Absent
from megatron_lite.config.errors import Problem
from megatron_lite.config.rules.common import (
    Rule,
    WorldRule,
    nearest_multiples,
    without_effect,
)
from megatron_lite.config.schema import LoggingConfig, RunConfig

MOST_RECORDED = 100
"""Iterations of one trace: the profiler holds all of them in memory until it writes."""
WINDOW = ("profile_step_start", "profile_ranks")


def wandb_has_a_project(cfg: RunConfig) -> Iterator[Problem]:
    """A name alone logs nowhere."""
    if cfg.logging.wandb_project is None:
        names, why = ("wandb_exp_name",), "without logging.wandb_project"
        yield from without_effect(cfg.logging, LoggingConfig, names, "logging", why)


def numbers_have_a_place(cfg: RunConfig) -> Iterator[Problem]:
    """These are on curves alone, the histograms in TensorBoard alone."""
    logging = cfg.logging
    if logging.tensorboard_dir is not None:
        return
    why = "without logging.tensorboard_dir"
    names: tuple[str, ...] = ("log_histograms_interval",)
    yield from without_effect(logging, LoggingConfig, names, "logging", why)
    if logging.csv_dir is None and logging.wandb_project is None:
        names, why = ("log_params_norm", "log_num_zeros_in_grad"), "where no curves are written"
        yield from without_effect(logging, LoggingConfig, names, "logging", why)


def histograms_come_with_a_log(cfg: RunConfig) -> Iterator[Problem]:
    """They are taken at log steps."""
    interval, log = cfg.logging.log_histograms_interval, cfg.logging.log_interval
    if interval % log:
        rule = f"must be a multiple of logging.log_interval {log}"
        nearest = f"use {nearest_multiples(interval, log)}"
        yield Problem("logging.log_histograms_interval", interval, rule, nearest)


def states_can_be_measured(cfg: RunConfig) -> Iterator[Problem]:
    """DeepSpeed reads nvme into buffers that it may use again: what was there is gone."""
    zero = cfg.deepspeed.zero_optimization
    if "nvme" not in (zero.offload_optimizer.device, zero.offload_param.device):
        return
    names = ("log_params_norm", "log_num_zeros_in_grad", "log_histograms_interval")
    for name in names:
        if value := getattr(cfg.logging, name):
            yield Problem(f"logging.{name}", value, "can't read states on nvme", "leave it out")


def profile_is_asked_for(cfg: RunConfig) -> Iterator[Problem]:
    """When and where to record means nothing unless something is recorded."""
    if not cfg.logging.profile:
        why = "without logging.profile"
        yield from without_effect(cfg.logging, LoggingConfig, WINDOW, "logging", why)
        if cfg.logging.profile_step_end != cfg.logging.profile_step_start + 4:
            path, last = "logging.profile_step_end", cfg.logging.profile_step_end
            yield Problem(path, last, f"has no effect {why}", "leave it out")


def profile_fits(cfg: RunConfig) -> Iterator[Problem]:
    """A step to wait, one to warm up, and at least one to record, but not too many."""
    logging = cfg.logging
    if not logging.profile:
        return
    first, last = logging.profile_step_start + 2, logging.profile_step_end
    if last < first:
        rule = f"must be at least {first}, the first iteration that is recorded"
        yield Problem("logging.profile_step_end", last, rule, f"use {first + 2}")
    elif last - first >= MOST_RECORDED:
        rule = f"would record {last - first + 1} iterations, more than {MOST_RECORDED}"
        yield Problem("logging.profile_step_end", last, rule, f"use {first + 2}")
    if not logging.profile_ranks:
        yield Problem("logging.profile_ranks", [], "names no rank", "use [0]")


def profile_ranks_exist(cfg: RunConfig, world_size: int) -> Iterator[Problem]:
    """A trace of a rank that the run does not have would be missed at its end."""
    missing = [rank for rank in cfg.logging.profile_ranks if rank >= world_size]
    if cfg.logging.profile and missing:
        rule = f"ranks {missing} are not there: the run has {world_size}"
        nearest = f"use ranks below {world_size}"
        yield Problem("logging.profile_ranks", list(cfg.logging.profile_ranks), rule, nearest)


def missing_packages(cfg: RunConfig) -> Iterator[Problem]:
    """Packages that only some configs need; a faulty field is passed over."""
    try:
        project = cfg.logging.wandb_project
    except Absent:
        return
    spec = None if project is None else find_spec("wandb")
    # W&B leaves a folder `wandb` where it runs, which Python would take for a package: it has no
    # origin.
    if project is not None and (spec is None or spec.origin is None):
        rule = "needs the package wandb, which is not installed"
        yield Problem("logging.wandb_project", project, rule, "pip install wandb, or use null")


RULES: tuple[Rule, ...] = (
    wandb_has_a_project,
    numbers_have_a_place,
    histograms_come_with_a_log,
    states_can_be_measured,
    profile_is_asked_for,
    profile_fits,
)
WORLD_RULES: tuple[WorldRule, ...] = (profile_ranks_exist,)
