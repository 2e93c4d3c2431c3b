"""Dropout on a tensor group: alike where ranks hold copies, apart where they hold shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.load import load_config
from megatron_lite.data.loader import MicroBatch
from megatron_lite.layers.attention import SelfAttention
from megatron_lite.layers.context import Init, LayerContext
from megatron_lite.layers.dropout import HiddenDropout
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.random import RngStreams
from tests.distributed.models import VOCAB
from tests.distributed.ranks import on_ranks
from tests.logical import gradient, logical_parts

SELECTIVE = ['training.recompute_granularity="selective"']
FULL = ['training.recompute_granularity="full"', "training.recompute_num_layers=2"]


def started(**sizes: int) -> tuple[ProcessGroups, RngStreams]:
    """Groups and seeded streams of this rank on a grid."""
    groups = ProcessGroups.create(Grid(rank=dist.get_rank(), **sizes))
    streams = RngStreams(torch.device("cpu"))
    streams.seed(1, groups.grid)
    return groups, streams


def hidden_mask(groups: ProcessGroups, streams: RngStreams, *, cut: bool) -> list[bool]:
    """What the layer drops of 64 ones."""
    context = LayerContext(group=groups.tensor, streams=streams, sequence_parallel=cut)
    dropped: Tensor = HiddenDropout(context, 0.5)(torch.ones(8, 8))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    return (dropped == 0).flatten().tolist()


def attention_core(groups: ProcessGroups, streams: RngStreams, config: Any) -> Tensor:
    """What reaches the output layer where both ranks have the same projections and input."""
    context = LayerContext(group=groups.tensor, streams=streams)
    layer = SelfAttention(config, context, "a", output_init=Init(0.1), recompute_core=False)
    with torch.no_grad():
        weight = layer.query_key_value.weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].detach().clone())

    layer.output.register_forward_pre_hook(look)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    layer(x, 1)
    layer.eval()
    layer(x, 1)
    return torch.stack(seen)


def masks(config_path: Path) -> dict[str, Any]:
    tensor, streams = started(tp_size=2)
    config = load_config(config_path, ["model.attention_dropout=0.5"], 2).config
    found: dict[str, Any] = {
        "whole": hidden_mask(tensor, streams, cut=False),
        "cut": hidden_mask(tensor, streams, cut=True),
        "whole again": hidden_mask(tensor, streams, cut=False),
        "attention": attention_core(tensor, streams, config.model).numpy(),
    }
    data, streams = started(dp_size=2)
    return found | {"replica": hidden_mask(data, streams, cut=False)}


def test_masks_fit_the_layout(configs: dict[str, Path]) -> None:
    first, second = on_ranks(2, masks, configs["gpt"])
    assert first["whole"] == second["whole"]
    assert first["cut"] != second["cut"]
    assert first["whole again"] == second["whole again"] != first["whole"]
    assert first["replica"] != second["replica"]
    trained, evaluated = zip(first["attention"], second["attention"], strict=True)
    np.testing.assert_array_equal(*evaluated)
    assert (np.abs(trained[0] - trained[1]) > 1e-3).mean() > 0.5


def recomputed(config_path: Path, sequence_parallel: bool) -> list[tuple[float, dict[str, Any]]]:
    """Loss and gradients of a model with dropout: plain, and with both kinds of recomputation."""
    found = []
    for overrides in ([], SELECTIVE, FULL):
        dropout = ["model.attention_dropout=0.2", "model.hidden_dropout=0.2"]
        config = load_config(config_path, dropout + overrides, 1).config
        groups, streams = started(tp_size=2)
        context = LayerContext(
            group=groups.tensor, seed=1, streams=streams, sequence_parallel=sequence_parallel
        )
        stage = GPTStage(
            config.model, context, layers=range(4), vocab_size=VOCAB, training=config.training
        )
        tokens = torch.arange(66).view(2, 33) % VOCAB
        loss = stage(MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 32)))
        loss.backward()
        found.append((loss.item(), logical_parts(stage, gradient)))
    return found


def both_recomputed(config_path: Path) -> list[list[tuple[float, dict[str, Any]]]]:
    return [recomputed(config_path, cut) for cut in (False, True)]


def test_recomputation_keeps_every_bit_on_a_tensor_group(configs: dict[str, Path]) -> None:
    for of_rank in on_ranks(2, both_recomputed, configs["gpt"]):
        for (loss, gradients), *others in of_rank:
            for other_loss, other_gradients in others:
                assert other_loss == loss
                for name, values in gradients.items():
                    np.testing.assert_array_equal(other_gradients[name], values, err_msg=name)
        assert of_rank[0][0][0] != of_rank[1][0][0], "dropout is cut otherwise: it can't be equal"
