"""Logits of our model with the weights of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lite.convert.target import Target
from megatron_lite.data.loader import MicroBatch
from megatron_lite.layers.context import LayerContext
from megatron_lite.models.gpt import GPTStage
from tests.checkpoints import Arrays
from tests.logical import fill


def logits_of(target: Target, arrays: Arrays, tokens: Tensor) -> Tensor:
    """tokens [b, s] → [b, s, V] float32, without padding."""
    layers = range(target.model.num_layers)
    stage = GPTStage(target.model, LayerContext(), layers=layers, vocab_size=target.vocab_size)
    weights = {n: v for (n, state), v in arrays.items() if state in ("fp32", "weight")}
    fill(stage, {name: torch.from_numpy(values) for name, values in weights.items()})
    found: list[Tensor] = []

    def look(head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append(head.logits(inputs[0]).detach())  # type: ignore[operator]

    stage.head.register_forward_pre_hook(look)
    stage.eval()(MicroBatch(tokens, tokens, torch.ones(tokens.shape)))
    return found[0].view(*tokens.shape, -1)[..., : target.vocab_size]
