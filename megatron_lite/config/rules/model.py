"""Rules inside the section `model`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config.errors import Problem
from megatron_lite.config.rules.common import Rule, choices, divisors
from megatron_lite.config.schema import RunConfig


def query_groups_divide_heads(cfg: RunConfig) -> Iterator[Problem]:
    """Each key/value head serves the same number of query heads."""
    heads, groups = cfg.model.num_attention_heads, cfg.model.num_query_groups
    if heads % groups:
        rule = f"must divide model.num_attention_heads {heads}"
        yield Problem("model.num_query_groups", groups, rule, choices(divisors(heads), groups))


def learned_positions_reach(cfg: RunConfig) -> Iterator[Problem]:
    """A learned table needs a row for every position of a sample."""
    seq, rows = cfg.model.seq_length, cfg.model.max_position_embeddings
    if cfg.model.position_embedding_type == "learned_absolute" and seq > rows:
        rule = f"must be at most model.max_position_embeddings {rows} with learned positions"
        yield Problem("model.seq_length", seq, rule, f"use {rows}, or a longer table")


def rotary_columns_pair_up(cfg: RunConfig) -> Iterator[Problem]:
    """Rotary embeddings turn columns in pairs."""
    if cfg.model.position_embedding_type != "rope":
        return
    columns, percent = cfg.model.kv_channels, cfg.model.rotary_percent
    turned = int(columns * percent)
    if turned < 2 or turned % 2:
        rule = (
            f"must turn an even number of a head's {columns} columns, at least 2; it turns {turned}"
        )
        even = max(2, turned // 2 * 2)
        nearest = f"use {even / columns:g}" if even <= columns else "use another model.kv_channels"
        yield Problem("model.rotary_percent", percent, rule, nearest)


RULES: tuple[Rule, ...] = (
    query_groups_divide_heads,
    learned_positions_reach,
    rotary_columns_pair_up,
)
