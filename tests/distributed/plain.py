"""One optimizer step in one process by plain autograd and AdamW's formula, to compare with.

Only the model is ours; batching, weighting, the norm, clipping and the update are written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_lite.build import build_run_datasets
from megatron_lite.build_model import Place, build_context, build_plan, build_stages
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.loader import MicroBatch
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.random import RngStreams
from megatron_lite.trainer import Trainer
from tests.logical import gradient, logical_parts

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class PlainStep:
    """The first step of a run."""

    loss: float
    norm: float
    gradients: Arrays
    """Before clipping."""
    clipped: Arrays
    weights: Arrays
    """After the update."""


def whole_model(config: RunConfig, *, vocab_size: int) -> GPTStage:
    """The model of a config, in one piece and with its first weights."""
    place = Place(ProcessGroups.single(), torch.device("cpu"), Path())
    context = build_context(config, place, RngStreams(place.device))
    return build_stages(config, context, build_plan(config, 1), Grid(), vocab_size=vocab_size)[0]


def plain_step(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    mask: Callable[[Tensor], Tensor] = torch.ones_like,
) -> PlainStep:
    """The first global batch as one batch; `mask` makes the loss mask from the tokens."""
    config = load_config(path, overrides, 1).config
    vocab = config.model.vocab_size
    stage = whole_model(config, vocab_size=vocab)
    samples = build_run_datasets(config, vocab_size=vocab).train
    rows = [samples[k] for k in range(config.training.global_batch_size)]
    tokens = torch.from_numpy(np.stack(rows))
    weights = mask(tokens[:, :-1]).float()
    loss = stage(MicroBatch(tokens[:, :-1], tokens[:, 1:], weights)) / weights.sum()
    loss.backward()
    gradients = logical_parts(stage, gradient)
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    limit = config.training.clip_grad
    scale = min(1.0, limit / norm) if limit else 1.0
    clipped = {name: scale * g for name, g in gradients.items()}
    optimizer = config.optimizer
    after = {}
    for name, value in logical_parts(stage).items():
        decay = optimizer.weight_decay if value.ndim > 1 else 0.0
        # At the first step both bias corrections undo the averaging.
        direction = clipped[name] / (np.abs(clipped[name]) + optimizer.adam_eps)
        after[name] = value * (1 - optimizer.lr * decay) - optimizer.lr * direction
    return PlainStep(loss.item(), norm, gradients, clipped, after)


def unequal_mask(tokens: Tensor) -> Tensor:
    """As many leading positions of a row [b, s] as its first token says, from none to all."""
    length = tokens.shape[1]
    return (torch.arange(length) < tokens[:, :1] % (length + 1)).float()


def mask_unequally(trainer: Trainer) -> None:
    """Give the run's training data the same mask."""
    batches = trainer.train_batches
    trainer.train_batches = (
        MicroBatch(b.tokens, b.labels, unequal_mask(b.tokens)) for b in batches
    )


def assert_close(found: Arrays, expected: Arrays, *, rtol: float = 1e-4) -> None:
    """Compare logical tensors; elements that are mere rounding count by the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(np.abs(values).max() for values in expected.values())
    for name, values in expected.items():
        atol = 2e-5 * np.abs(values).max() + 1e-7 * largest
        np.testing.assert_allclose(found[name], values, rtol=rtol, atol=atol, err_msg=name)
