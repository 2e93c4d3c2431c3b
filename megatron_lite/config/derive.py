"""Nulls that stand for a rule, turned into its result on a draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from megatron_lite.config import batch
from megatron_lite.config.draft import Absent, Draft
from megatron_lite.config.errors import Problem
from megatron_lite.config.rules.common import nearest_multiples
from megatron_lite.config.schema import RunConfig


class Underivable(Exception):
    """The rule has no result; carries the problem to report."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def default_ffn_hidden_size(hidden_size: int, *, swiglu: bool) -> int:
    """Inner columns of the MLP that keep its parameters at about 8 x hidden_size^2.

    >>> default_ffn_hidden_size(768, swiglu=False), default_ffn_hidden_size(4096, swiglu=True)
    (3072, 10880)
    """
    if not swiglu:
        return 4 * hidden_size
    return max(64, 8 * hidden_size // 3 // 64 * 64)


def _kv_channels(cfg: RunConfig) -> int:
    hidden, heads = cfg.model.hidden_size, cfg.model.num_attention_heads
    if hidden % heads:
        rule = f"must be a multiple of model.num_attention_heads {heads} (or give kv_channels)"
        nearest = f"use {nearest_multiples(hidden, heads)}"
        raise Underivable(Problem("model.hidden_size", hidden, rule, nearest))
    return hidden // heads


def _lr_decay_iters(cfg: RunConfig) -> int:
    training = cfg.training
    given = [training.train_iters, training.train_samples]
    if given.count(None) != 1 or (training.train_iters is None and batch.rampup_fault(training)):
        raise Absent("the length of the run")
    return max(1, batch.train_iters(training))


_RULES: tuple[tuple[str, str, Callable[[RunConfig], Any]], ...] = (
    (
        "model",
        "ffn_hidden_size",
        lambda c: default_ffn_hidden_size(c.model.hidden_size, swiglu=c.model.swiglu),
    ),
    ("model", "kv_channels", _kv_channels),
    ("model", "num_query_groups", lambda c: c.model.num_attention_heads),
    ("model", "max_position_embeddings", lambda c: c.model.seq_length),
    ("model", "add_qkv_bias", lambda c: c.model.add_bias_linear),
    ("training", "eval_micro_batch_size", lambda c: c.training.micro_batch_size),
    ("optimizer", "lr_decay_iters", _lr_decay_iters),
    ("checkpoint", "exit_on_missing_checkpoint", lambda c: c.checkpoint.load is not None),
    ("logging", "profile_step_end", lambda c: c.logging.profile_step_start + 4),
    (
        "launch",
        "gpus_per_node",
        lambda c: c.parallel.tensor_model_parallel_size * c.parallel.pipeline_model_parallel_size,
    ),
)


def derive(draft: Draft, report: Callable[[Problem], None]) -> list[str]:
    """Fill the draft's nulls and return their JSON paths; a null without inputs becomes absent."""
    filled = []
    for section_name, name, rule in _RULES:
        section: Draft = getattr(draft, section_name)
        try:
            if getattr(section, name) is not None:
                continue
            section.set(name, rule(cast(RunConfig, draft)))
            filled.append(f"{section_name}.{name}")
        except Underivable as error:
            report(error.problem)
            section.drop(name)
        except Absent:
            if name in section.as_dict():
                section.drop(name)
    return filled
