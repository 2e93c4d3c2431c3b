"""The two gradients of a tied table in one graph meet in float32, not in the table's 16 bits."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.config.load import load_config
from megatron_lite.data.loader import MicroBatch
from megatron_lite.engine.gradients import GradientAccumulator
from megatron_lite.layers.context import LayerContext
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.groups import Group
from tests.distributed.models import GPT, VOCAB, write_config

COUNT = 4


def micro_batches() -> list[MicroBatch]:
    tokens = torch.randint(0, VOCAB, (COUNT, 2, 33), generator=torch.Generator().manual_seed(3))
    return [MicroBatch(t[:, :-1], t[:, 1:], torch.ones(2, 32)) for t in tokens]


def a_stage(folder: Path, dtype: torch.dtype, *, apart: bool) -> GPTStage:
    config = load_config(write_config(folder / "run.json", folder / "none", GPT), (), 1).config
    context = LayerContext(seed=1, dtype=dtype, gradients_apart=apart)
    return GPTStage(config.model, context, layers=range(2), vocab_size=VOCAB)


def summed_by_plain_autograd(stage: GPTStage) -> Tensor:
    """The head reads a table of its own here, so that each gradient is seen alone."""
    table, twin = stage.embedding.word_embeddings, deepcopy(stage.embedding.word_embeddings)
    stage.head.table = twin
    total = torch.zeros(table.weight.shape)
    for batch in micro_batches():
        table.weight.grad = twin.weight.grad = None
        stage(batch).backward()
        assert table.weight.grad is not None and twin.weight.grad is not None
        total += twin.weight.grad.float()
        total += table.weight.grad.float()
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_gradients_of_a_tied_table_are_added_in_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = summed_by_plain_autograd(a_stage(tmp_path, dtype, apart=False)).to(dtype)
    found = {}
    for apart in (True, False):
        stage = a_stage(tmp_path, dtype, apart=apart)
        table = stage.embedding.word_embeddings.weight
        sums = GradientAccumulator([table], fp32=True, tensor_group=Group())
        sums.begin(COUNT)
        for batch in micro_batches():
            stage(batch).backward()
        (found[apart],) = sums.ready()
    torch.testing.assert_close(found[True], expected, rtol=0, atol=0)
    assert (found[False] != expected).sum() > 100, "in 16 bits the sums must show"
