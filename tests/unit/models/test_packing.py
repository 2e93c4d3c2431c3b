"""Packed documents do not see each other: the whole equals each document run alone, float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.config.load import load_config
from megatron_lite.data.boundaries import documents_between, positions_inside
from megatron_lite.data.loader import MicroBatch
from megatron_lite.layers.context import LayerContext
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.random import RngStreams
from tests.distributed.models import GPT, LLAMA, VOCAB, write_config
from tests.logical import fill, gradient, logical_parts, random_values

EOD = VOCAB - 1
MODELS = {"llama": LLAMA, "gpt": GPT | {"max_position_embeddings": 48}}


def build(folder: Path, section: dict[str, object], *overrides: str) -> GPTStage:
    """A whole model on one process with the same random weights each time."""
    path = write_config(folder / "run.json", folder / "none", section)
    config = load_config(path, overrides, 1).config
    layers = range(config.model.num_layers)
    streams = RngStreams(torch.device("cpu"))
    streams.seed(1, Grid(tp_size=1, dp_size=1, pp_size=1, rank=0))
    stage = GPTStage(
        config.model,
        LayerContext(seed=1, streams=streams),
        layers=layers,
        vocab_size=VOCAB,
        training=config.training,
    )
    fill(stage, {n: 0.1 * v + (v.dim() == 1) for n, v in random_values(stage).items()})
    return stage


def packed() -> MicroBatch:
    """Two sequences of 32: documents of 1 to 20 tokens, a third of the tokens without weight."""
    tokens = torch.randint(0, EOD, (2, 33), generator=torch.Generator().manual_seed(1))
    tokens[0, [4, 5, 25]] = EOD
    tokens[1, [11, 31]] = EOD
    mask = (torch.arange(64).view(2, 32) % 3 > 0).float()
    inputs = tokens[:, :-1]
    ids = documents_between(inputs.numpy(), EOD)
    positions = torch.from_numpy(positions_inside(ids))
    return MicroBatch(inputs, tokens[:, 1:], mask, positions, torch.from_numpy(ids))


def documents(batch: MicroBatch) -> Iterator[MicroBatch]:
    """Each document as a sequence of its own."""
    for row in range(len(batch.tokens)):
        ends = (batch.tokens[row] == EOD).nonzero().flatten() + 1
        bounds = [0, *ends.tolist(), batch.tokens.shape[1]]
        for first, last in pairwise(bounds):
            if last > first:
                cut = (slice(row, row + 1), slice(first, last))
                yield MicroBatch(batch.tokens[cut], batch.labels[cut], batch.loss_mask[cut])


def gradients(stage: GPTStage, loss: Tensor) -> dict[str, np.ndarray]:
    stage.zero_grad()
    loss.backward()
    return logical_parts(stage, gradient)


def assert_alike(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        scale = max(1.0, float(np.abs(values).max()))  # a key's bias has no gradient but rounding
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    "recompute",
    [(), ("training.recompute_granularity=selective",), ("training.recompute_granularity=full",)],
)
@pytest.mark.parametrize("model", MODELS)
def test_a_packed_sequence_equals_its_documents(
    model: str, recompute: tuple[str, ...], tmp_path: Path
) -> None:
    stage = build(tmp_path, MODELS[model], *recompute)
    batch = packed()
    alone = list(documents(batch))
    assert [one.tokens.shape[1] for one in alone] == [5, 1, 20, 6, 12, 20]
    loss = stage(batch)
    expected_loss = sum((stage(one) for one in alone), start=torch.zeros(()))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert_alike(gradients(stage, loss), gradients(stage, expected_loss))


def test_each_option_counts_alone(tmp_path: Path) -> None:
    """RoPE tells distances only, so under the mask positions change nothing; else they do."""
    stage, batch = build(tmp_path, LLAMA), packed()
    both, neither = stage(batch), stage(replace(batch, position_ids=None, document_ids=None))
    masked = stage(replace(batch, position_ids=None))
    moved = stage(replace(batch, document_ids=None))
    torch.testing.assert_close(masked, both, rtol=1e-5, atol=0)
    assert len({round(loss.item(), 3) for loss in (both, neither, moved)}) == 3


def test_dropout_and_the_mask_together(tmp_path: Path) -> None:
    """With dropout a token still sees its own document alone: others leave it no gradient."""
    stage = build(tmp_path, GPT | {"attention_dropout": 0.5, "max_position_embeddings": 48})
    batch = packed()
    second = replace(batch, loss_mask=(batch.document_ids == 1).float())
    second = replace(second, position_ids=None)  # so that each token has a row of its own
    rows = np.abs(gradients(stage, stage(second))["embedding.position_embeddings.weight"]).max(1)
    seen = (batch.document_ids == 1).any(0).numpy()
    assert seen.sum() == 21 and (rows[:32][seen] > 0).all()
    assert (rows[:32][~seen] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    exact, stage, batch = build(tmp_path, LLAMA), build(tmp_path, LLAMA).to(dtype), packed()
    with torch.no_grad():
        found, expected = stage(batch), exact(batch)
        unpacked = exact(replace(batch, document_ids=None, position_ids=None))
    error = abs(found - expected)
    assert error < 0.01 * expected and 4 * error < abs(unpacked - expected)
