"""Token and position embeddings; the vocabulary is cut over the tensor group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megatron_lite.config.schema import ModelConfig
from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.dropout import HiddenDropout
from megatron_lite.mpu.mappings import (
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
)
from megatron_lite.sharding.placement import replicated, sharded

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""Logical name of the table that a tied output head shares."""


def padded_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """The next multiple; it must not depend on the layout, or models of two layouts would differ.

    >>> padded_vocab_size(50257, 128)
    50304
    """
    return -(-vocab_size // divisible_by) * divisible_by


class VocabParallelEmbedding(nn.Module):
    """tokens [t] → [t, h]; each rank holds V_padded / size rows of the table [V, h].

    `scatter`: the result is this rank's t / size tokens, for sequence parallelism. `second_copy`:
    another stage holds the table too, and that one is counted.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        vocab_size: int,
        width: int,
        *,
        padded: int,
        init: Init,
        scatter: bool = False,
        second_copy: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.scatter = context.group, scatter
        rank, size = self.group.rank, self.group.size
        cut = sharded(name, (vocab_size, width), dim=0, rank=rank, size=size, padded=padded)
        self.weight = context.parameter(replace(cut, counted=not second_copy), init)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.group.rank * rows
        absent = (local < 0) | (local >= rows)
        partial = F.embedding(local.masked_fill(absent, 0), self.weight)
        partial = partial.masked_fill(absent[:, None], 0.0)
        if self.scatter:
            return reduce_scatter_to_sequence_region(partial, self.group)
        return reduce_from_tensor_region(partial, self.group)


def gradient_apart(table: nn.Parameter) -> Tensor:
    """The table itself, for its second use in one graph: this use's gradient goes to the parameter
    (and its hooks) alone, as soon as it is there, and the other one's follows.

    Autograd would add the two in the table's own 16-bit type before any hook sees them.
    """
    return _Apart.apply(table)


class _Apart(Function):
    @staticmethod
    def forward(ctx: Any, table: nn.Parameter) -> Tensor:
        ctx.table = table
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        torch.autograd.backward(ctx.table, grad)


class ModelEmbedding(nn.Module):
    """tokens [b, s] → hidden [b · s, h]: token vectors, plus learned positions where asked for.

    `positions` int64 [b, s] are the tokens' positions where they are not 0 … s - 1.
    """

    def __init__(self, model: ModelConfig, context: LayerContext, *, vocab_size: int) -> None:
        super().__init__()
        init = Init(std=model.init_method_std)
        self.group, self.sequence_parallel = context.group, context.sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(
            context,
            WORD_EMBEDDINGS,
            vocab_size,
            model.hidden_size,
            padded=padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by),
            init=init,
            scatter=context.sequence_parallel,
        )
        self.position_embeddings: nn.Parameter | None = None
        if model.position_embedding_type == "learned_absolute":
            shape = (model.max_position_embeddings, model.hidden_size)
            name = "embedding.position_embeddings.weight"
            table = replicated(name, shape, rank=context.group.rank)
            self.position_embeddings = context.parameter(
                table, init, partial_grad=context.sequence_parallel
            )
        self.dropout = HiddenDropout(context, model.hidden_dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = self.word_embeddings(tokens.reshape(-1))
        if self.position_embeddings is not None and positions is not None:
            hidden = self._add_own_positions(hidden, positions)
        elif self.position_embeddings is not None:
            hidden = self._add_positions(hidden, *tokens.shape)
        return self.dropout(hidden)

    def _add_positions(self, hidden: Tensor, batch: int, length: int) -> Tensor:
        """Add row p of the table to the token at position p of its sequence."""
        assert self.position_embeddings is not None
        table = self.position_embeddings[:length]
        if not self.sequence_parallel:
            return (hidden.view(batch, length, -1) + table).view_as(hidden)
        first = self.group.rank * hidden.shape[0]
        index = torch.arange(first, first + hidden.shape[0], device=table.device) % length
        return hidden + table[index]

    def _add_own_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Add row positions[b, s] of the table to each token."""
        assert self.position_embeddings is not None
        index = positions.reshape(-1)
        if self.sequence_parallel:
            count = hidden.shape[0]
            index = index[self.group.rank * count : (self.group.rank + 1) * count]
        return hidden + F.embedding(index, self.position_embeddings)
