"""A backward split in two gives the gradients of one in a piece, the linear layers' ones later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.config.load import load_config
from megatron_lite.data.loader import MicroBatch
from megatron_lite.engine.gradients import GradientAccumulator
from megatron_lite.layers.context import LayerContext
from megatron_lite.layers.deferred import WeightGradients
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import Group
from megatron_lite.mpu.random import RngStreams
from tests.distributed.models import GPT, LLAMA, write_config
from tests.logical import gradient, logical_parts

VOCAB, COUNT = 96, 3


def micro_batches() -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (COUNT, 2, 17), generator=generator)
    return [MicroBatch(t[:, :-1], t[:, 1:], torch.ones(2, 16)) for t in tokens]


def a_stage(
    tmp_path: Path, model: dict[str, object], overrides: list[str], later: WeightGradients | None
) -> GPTStage:
    path = write_config(tmp_path / "run.json", tmp_path / "none", model)
    config = load_config(path, overrides, 1, check_files=False).config
    streams = RngStreams(torch.device("cpu"))
    streams.seed(1, Grid())
    return GPTStage(
        config.model,
        LayerContext(seed=1, streams=streams, weight_gradients=later),
        layers=range(config.model.num_layers),
        vocab_size=VOCAB,
        training=config.training,
    )


@pytest.mark.parametrize("fp32", [False, True], ids=["autograd", "buffers"])
@pytest.mark.parametrize("recompute", ["null", '"selective"', '"full"'])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_split_and_whole_backwards_agree(
    model: dict[str, object], recompute: str, fp32: bool, tmp_path: Path
) -> None:
    """Several micro-batches, all second halves at the end and in another order; dropout is on."""
    overrides = [f"training.recompute_granularity={recompute}", "model.hidden_dropout=0.2"]
    whole = a_stage(tmp_path, model, overrides, None)
    for batch in micro_batches():
        whole(batch).backward()
    later = WeightGradients()
    split = a_stage(tmp_path, model, overrides, later)  # seeds the streams anew
    gradients = GradientAccumulator(
        list(split.parameters()), fp32=fp32, tensor_group=Group(), shared=()
    )
    gradients.begin(COUNT)
    waiting = []
    for batch in micro_batches():
        with later.deferred() as halves:
            split(batch).backward()
        waiting.append(halves)
    for halves in reversed(waiting):
        for half in halves:
            gradients.add(half.weight, half.compute())
    for parameter, grad in zip(gradients.parameters, gradients.ready(), strict=True):
        parameter.grad = grad
    expected = logical_parts(whole, gradient)
    found = logical_parts(split, gradient)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=1e-6, err_msg=name)


def test_only_the_weights_of_linear_layers_wait(tmp_path: Path) -> None:
    """After the first half norms, biases and positions have their gradients, weights have none; the
    token table has the embedding's part of it."""
    later = WeightGradients()
    stage = a_stage(tmp_path, GPT, [], later)
    with later.deferred() as waiting:
        stage(micro_batches()[0]).backward()
    without = {name for name, p in stage.named_parameters() if p.grad is None}
    linear = {name for name, p in stage.named_parameters() if p.dim() == 2 and "embed" not in name}
    assert without == linear
    names = {id(p): name for name, p in stage.named_parameters()}
    assert {names[id(half.weight)] for half in waiting} == linear | {
        "embedding.word_embeddings.weight"
    }


def test_outside_of_a_split_backward_nothing_waits(tmp_path: Path) -> None:
    stage = a_stage(tmp_path, LLAMA, [], WeightGradients())
    stage(micro_batches()[0]).backward()
    assert all(p.grad is not None for p in stage.parameters())
