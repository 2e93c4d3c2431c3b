"""What the tensor size and the size of the world must divide; pipeline.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config.errors import Problem
from megatron_lite.config.rules.common import (
    Rule,
    WorldRule,
    choices,
    divisors,
    nearest_multiples,
)
from megatron_lite.config.schema import RunConfig

TENSOR_SIZE = "parallel.tensor_model_parallel_size"


def _tensor_size_divides(tp: int, what: str, size: int) -> Iterator[Problem]:
    if size % tp:
        yield Problem(TENSOR_SIZE, tp, f"must divide {what} {size}", choices(divisors(size), tp))


def tensor_size_divides_heads(cfg: RunConfig) -> Iterator[Problem]:
    """A rank holds whole query heads."""
    tp = cfg.parallel.tensor_model_parallel_size
    yield from _tensor_size_divides(tp, "model.num_attention_heads", cfg.model.num_attention_heads)


def tensor_size_divides_query_groups(cfg: RunConfig) -> Iterator[Problem]:
    """A rank holds whole key/value heads; copies of one head on two ranks are not supported."""
    tp, groups = cfg.parallel.tensor_model_parallel_size, cfg.model.num_query_groups
    if groups != cfg.model.num_attention_heads:  # else the rule on heads says it
        yield from _tensor_size_divides(tp, "model.num_query_groups", groups)


def tensor_size_divides_ffn(cfg: RunConfig) -> Iterator[Problem]:
    """A rank holds an equal part of the MLP's inner columns."""
    tp = cfg.parallel.tensor_model_parallel_size
    yield from _tensor_size_divides(tp, "model.ffn_hidden_size", cfg.model.ffn_hidden_size)


def tensor_size_divides_vocabulary(cfg: RunConfig) -> Iterator[Problem]:
    """A rank holds an equal part of the padded vocabulary, whose size must not depend on tp."""
    tp, multiple = cfg.parallel.tensor_model_parallel_size, cfg.model.make_vocab_size_divisible_by
    yield from _tensor_size_divides(tp, "model.make_vocab_size_divisible_by", multiple)


def sequence_parallel_fits(cfg: RunConfig) -> Iterator[Problem]:
    """Sequence parallelism cuts a sample's tokens over the tensor-parallel ranks."""
    if not cfg.parallel.sequence_parallel:
        return
    tp = cfg.parallel.tensor_model_parallel_size
    if tp == 1:
        rule = f"needs {TENSOR_SIZE} above 1: it shares work among tensor-parallel ranks"
        yield Problem("parallel.sequence_parallel", True, rule, "use false")
    yield from _tensor_size_divides(
        tp, "model.seq_length (parallel.sequence_parallel is on)", cfg.model.seq_length
    )


def world_size_fits(cfg: RunConfig, world_size: int) -> Iterator[Problem]:
    """The ranks form whole copies of the model."""
    tp, pp = cfg.parallel.tensor_model_parallel_size, cfg.parallel.pipeline_model_parallel_size
    if world_size < 1 or world_size % (tp * pp):
        rule = f"must be a multiple of tensor x pipeline size {tp} x {pp} = {tp * pp}"
        nearest = f"use {nearest_multiples(world_size, tp * pp)} ranks"
        yield Problem("world size", world_size, rule, nearest)


RULES: tuple[Rule, ...] = (
    tensor_size_divides_heads,
    tensor_size_divides_query_groups,
    tensor_size_divides_ffn,
    tensor_size_divides_vocabulary,
    sequence_parallel_fits,
)
WORLD_RULES: tuple[WorldRule, ...] = (world_size_fits,)
