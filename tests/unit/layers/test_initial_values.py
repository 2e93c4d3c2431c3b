"""First weights: the same logical model on every layout, with the spread that was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.config.load import load_config
from megatron_lite.config.schema import RunConfig
from megatron_lite.layers.context import Init, LayerContext, draw
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.groups import Group
from megatron_lite.sharding.placement import Box
from tests.distributed.models import GPT, LLAMA, write_config
from tests.distributed.runs import merged
from tests.logical import logical_parts

MODELS = {"gpt": GPT | {"qk_layernorm": True}, "llama": LLAMA}
VOCAB = 33


def config_of(tmp_path: Path, name: str) -> RunConfig:
    path = write_config(tmp_path / "run.json", tmp_path / "none", MODELS[name])
    return load_config(path, [f"model.vocab_size={VOCAB}"], 1, check_files=False).config


def stage(config: RunConfig, group: Group, layers: range, *, seed: int = 1) -> GPTStage:
    """A stage as one rank of a tensor group builds it; building communicates nothing."""
    count = config.model.num_layers
    return GPTStage(
        config.model,
        LayerContext(group=group, seed=seed),
        layers=layers,
        vocab_size=VOCAB,
        first=layers.start == 0,
        last=layers.stop == count,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_cut_is_a_slice_of_the_same_model(tmp_path: Path, model: str, size: int) -> None:
    config = config_of(tmp_path, model)
    count = config.model.num_layers
    whole = logical_parts(stage(config, Group(), range(count)))
    ranks = tuple(range(size))
    parts = [
        logical_parts(stage(config, Group(ranks, rank), layers))
        for rank in ranks
        for layers in (range(1), range(1, count))
    ]
    cut = merged(parts)
    assert cut.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(cut[name], values, err_msg=name)


def test_names_and_shapes_are_the_true_ones(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama")
    whole = logical_parts(stage(config, Group(), range(config.model.num_layers)))
    assert whole["embedding.word_embeddings.weight"].shape == (VOCAB, 64)
    assert whole["output_layer.weight"].shape == (VOCAB, 64)
    assert whole["layers.3.attention.query.weight"].shape == (64, 64)
    assert whole["layers.3.attention.key.weight"].shape == (32, 64)
    assert whole["layers.3.mlp.gate.weight"].shape == (96, 64)
    assert not any(np.isnan(values).any() for values in whole.values())


def test_spread_and_constants(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gpt")
    whole = logical_parts(stage(config, Group(), range(config.model.num_layers)))
    outputs = ("attention.output.weight", "mlp.down.weight")
    for name, values in whole.items():
        if "norm" in name and name.endswith("weight"):
            assert (values == 1).all(), name
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        else:
            std = 0.1 / (2 * 4) ** 0.5 if name.endswith(outputs) else 0.1
            assert values.std() == pytest.approx(std, rel=0.06), name
            assert abs(values.mean()) < 0.06 * std, name


def test_tensors_and_seeds_are_independent(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama")
    first, second = (logical_parts(stage(config, Group(), range(4), seed=seed)) for seed in (1, 2))
    flat = [
        values[:32, :64].ravel()
        for model in (first, second)
        for values in model.values()
        if values.ndim == 2
    ]
    correlation = np.corrcoef(np.stack(flat)) - np.eye(len(flat))
    assert np.abs(correlation).max() < 0.12  # five standard deviations of 2,048 pairs


def test_padding_rows_start_as_zeros(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama")
    table = stage(config, Group(), range(4)).embedding.word_embeddings.weight
    assert table.shape[0] == 40
    assert not table[VOCAB:].any()
    assert table[VOCAB - 1].all()


def test_boxes_across_blocks_are_slices() -> None:
    # Rows of 2^18 elements: a block is four rows.
    shape, init = (11, 1 << 18), Init(std=1.0)

    def values(row: int, rows: int, column: int, columns: int) -> torch.Tensor:
        return draw("a", shape, Box((row, column), (rows, columns)), init=init, seed=3)

    whole = values(0, 11, 0, 1 << 18)
    assert whole.std() == pytest.approx(1.0, rel=1e-2)
    assert torch.equal(values(3, 6, 100, 7), whole[3:9, 100:107])
    assert not torch.equal(whole[0], whole[4])
