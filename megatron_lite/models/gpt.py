"""A decoder-only language model. GPT-2, GPT-3 and LLaMA are settings of it.

A GPTStage is the part of it that one pipeline stage holds. `t` = b · s tokens: hidden states are
flat, so that any slice of tokens is contiguous.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ModelConfig, TrainingConfig
from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.cross_entropy import loss_kernels, vocab_parallel_cross_entropy
from megatron_lite.layers.embedding import (
    WORD_EMBEDDINGS,
    ModelEmbedding,
    VocabParallelEmbedding,
    gradient_apart,
    padded_vocab_size,
)
from megatron_lite.layers.linear import column_parallel_linear
from megatron_lite.layers.packing import Packing, document_mask
from megatron_lite.layers.recompute import recompute
from megatron_lite.layers.transformer_layer import TransformerLayer, block_norm


class Batch(Protocol):
    """What a stage reads of a micro-batch, each [b, s].

    position_ids, where given, are the tokens' positions; document_ids, where given, keep attention
    inside runs of equal ids. Every stage needs these two.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None
    document_ids: Tensor | None


class GPTStage(nn.Module):
    """Layers `layers` of a model; the `first` stage embeds tokens, the `last` computes the loss.

    `forward(batch, hidden)` returns hidden states [t, h] (t / size under sequence parallelism), or
    on the last stage the sum of the unmasked tokens' losses, float32. `embedding` is the table of a
    first stage on the same rank, for a tied head.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: LayerContext,
        *,
        layers: range,
        vocab_size: int,
        first: bool = True,
        last: bool = True,
        training: TrainingConfig | None = None,
        embedding: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.context = context
        self.recompute_plan = _recompute_plan(training, layers)
        selective = training is not None and training.recompute_granularity == "selective"
        if self.first:
            self.embedding = ModelEmbedding(model, context, vocab_size=vocab_size)
        self.layers = nn.ModuleList(
            TransformerLayer(model, context, index, recompute_attention=selective)
            for index in layers
        )
        if self.last:
            self.final_norm = block_norm(model, context, "final_norm")
            table = self.embedding.word_embeddings if self.first else embedding
            self.head = OutputHead(
                model,
                context,
                vocab_size=vocab_size,
                embedded=table is not None,
                compiled=training is not None and training.compile,
            )
            if not model.untie_embeddings_and_output_weights and table is not None:
                self.head.table = table

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        rows = batch.tokens.shape[0]
        if self.first:
            hidden = self.embedding(batch.tokens, batch.position_ids)
        assert hidden is not None
        mask = None
        if batch.document_ids is not None:
            mask = document_mask(batch.document_ids, hidden.dtype)
        hidden = self._run_layers(hidden, rows, Packing(batch.position_ids, mask))
        if not self.last:
            return hidden
        return self.head(self.final_norm(hidden), batch.labels, batch.loss_mask)

    def _run_layers(self, hidden: Tensor, rows: int, packing: Packing) -> Tensor:
        if not torch.is_grad_enabled():
            return self._run(hidden, rows, packing, 0, len(self.layers))
        for first, last, again in self.recompute_plan:
            if again:
                streams = self.context.streams
                hidden = recompute(self._run, hidden, rows, packing, first, last, streams=streams)
            else:
                hidden = self._run(hidden, rows, packing, first, last)
        return hidden

    def _run(self, hidden: Tensor, rows: int, packing: Packing, first: int, last: int) -> Tensor:
        for layer in self.layers[first:last]:
            hidden = layer(hidden, rows, packing)
        return hidden


class OutputHead(nn.Module):
    """hidden [t, h] → Σ loss over unmasked tokens. Tied, its table is the token embedding's.

    A tied head on another stage than the embedding holds a second copy of the table. The copy is
    not counted: the first stage's enters norms and checkpoints.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: LayerContext,
        *,
        vocab_size: int,
        embedded: bool,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = context.group, context.sequence_parallel
        self.weight_gradients = context.weight_gradients
        self.vocab_size = vocab_size
        self.kernels = loss_kernels(compiled=compiled)
        self.tied = not model.untie_embeddings_and_output_weights
        # A backward that is split leaves the head's gradient for later anyway.
        in_one_piece = context.weight_gradients is None
        self.apart = self.tied and embedded and in_one_piece and context.gradients_apart
        self.table: VocabParallelEmbedding | None = None
        if not (self.tied and embedded):
            self.table = VocabParallelEmbedding(
                context,
                WORD_EMBEDDINGS if self.tied else "output_layer.weight",
                vocab_size,
                model.hidden_size,
                padded=padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by),
                init=Init(std=model.init_method_std),
                second_copy=self.tied,
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """[t, h] → this rank's columns of the logits, [t, V_padded / size]."""
        assert self.table is not None
        table = self.table.weight
        return column_parallel_linear(
            hidden,
            gradient_apart(table) if self.apart else table,
            None,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            later=self.weight_gradients,
        )

    def forward(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            self.logits(hidden),
            labels.reshape(-1),
            loss_mask.reshape(-1),
            vocab_size=self.vocab_size,
            group=self.group,
            kernels=self.kernels,
        )


def _recompute_plan(training: TrainingConfig | None, layers: range) -> list[tuple[int, int, bool]]:
    """Cut the stage's layers into (first, last, whether they are recomputed as one).

    Uniform: every `recompute_num_layers` layers are one unit. Block: each of the first
    `recompute_num_layers` layers is a unit, the others keep their activations.
    """
    count = len(layers)
    if training is None or training.recompute_granularity != "full":
        return [(0, count, False)]
    number = training.recompute_num_layers
    if training.recompute_method == "uniform":
        return [(i, min(i + number, count), True) for i in range(0, count, number)]
    number = min(number, count)
    return [(i, i + 1, True) for i in range(number)] + [(number, count, False)]
