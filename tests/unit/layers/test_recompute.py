"""Recomputation changes memory and nothing else: with dropout on, every bit stays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.config.load import load_config
from megatron_lite.data.loader import MicroBatch
from megatron_lite.layers.context import LayerContext
from megatron_lite.models.gpt import GPTStage
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.random import RngStreams
from tests.distributed.models import GPT, LLAMA, write_config
from tests.logical import gradient, logical_parts

MODELS = {"gpt": GPT, "llama": LLAMA}
VOCAB = 96


def batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (2, 33), generator=generator)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 32))


@dataclass
class Outcome:
    losses: list[float]
    gradients: dict[str, np.ndarray]
    runs: list[int]
    """How often each layer's forward ran."""
    states: dict[str, torch.Tensor]
    """The random streams afterwards."""


def train_twice(tmp_path: Path, model: str, overrides: list[str], *, seed: int = 1) -> Outcome:
    """Two micro-batches through a model with dropout 0.2."""
    path = write_config(tmp_path / "run.json", tmp_path / "none", MODELS[model])
    dropout = ["model.attention_dropout=0.2", "model.hidden_dropout=0.2"]
    config = load_config(path, dropout + overrides, 1, check_files=False).config
    streams = RngStreams(torch.device("cpu"))
    streams.seed(seed, Grid())
    stage = GPTStage(
        config.model,
        LayerContext(seed=1, streams=streams),
        layers=range(config.model.num_layers),
        vocab_size=VOCAB,
        training=config.training,
    )
    runs = [0] * len(stage.layers)

    def count(index: int) -> None:
        runs[index] += 1

    for index, layer in enumerate(stage.layers):
        layer.register_forward_pre_hook(lambda _module, _inputs, index=index: count(index))
    losses = []
    for _ in range(2):
        loss = stage(batch())
        loss.backward()
        losses.append(loss.item())
    return Outcome(losses, logical_parts(stage, gradient), runs, streams.states())


def full(method: str, layers: int) -> list[str]:
    return [
        'training.recompute_granularity="full"',
        f'training.recompute_method="{method}"',
        f"training.recompute_num_layers={layers}",
    ]


SELECTIVE = ['training.recompute_granularity="selective"']


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Each model without recomputation."""
    return {name: train_twice(tmp_path_factory.mktemp(name), name, []) for name in MODELS}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("overrides", "runs"),
    [
        (full("uniform", 1), [4, 4, 4, 4]),
        (full("uniform", 3), [4, 4, 4, 4]),
        (full("block", 2), [4, 4, 2, 2]),
        (full("block", 4), [4, 4, 4, 4]),
        (SELECTIVE, [2, 2, 2, 2]),
    ],
    ids=["uniform-1", "uniform-3", "block-2", "block-4", "selective"],
)
def test_same_bits_as_without(
    tmp_path: Path,
    model: str,
    overrides: list[str],
    runs: list[int],
    plain: dict[str, Outcome],
) -> None:
    expected = plain[model]
    again = train_twice(tmp_path, model, overrides)
    assert expected.runs == [2, 2, 2, 2]
    assert again.runs == runs
    assert again.losses == expected.losses
    for name, values in expected.gradients.items():
        np.testing.assert_array_equal(again.gradients[name], values, err_msg=name)
    for name, state in expected.states.items():
        assert torch.equal(again.states[name], state), f"stream {name} went on differently"


def test_dropout_was_on(tmp_path: Path, plain: dict[str, Outcome]) -> None:
    """Without which the test above would say little."""
    first = plain["gpt"]
    assert first.losses[0] != first.losses[1]
    assert first.losses != train_twice(tmp_path, "gpt", [], seed=2).losses


def kept_bytes(tmp_path: Path, overrides: list[str]) -> int:
    """Bytes that the forward of a larger batch keeps for the backward."""
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    path = write_config(tmp_path / "run.json", tmp_path / "none", LLAMA)
    config = load_config(path, overrides, 1, check_files=False).config
    stage = GPTStage(
        config.model,
        LayerContext(),
        layers=range(4),
        vocab_size=VOCAB,
        training=config.training,
    )
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = stage(MicroBatch(tokens, tokens, torch.ones(8, 32)))
    assert loss.requires_grad
    parameters = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    return sum(size for pointer, size in found.items() if pointer not in parameters)


def test_it_saves_memory(tmp_path: Path) -> None:
    nothing = kept_bytes(tmp_path, [])
    selective = kept_bytes(tmp_path, SELECTIVE)
    one_by_one = kept_bytes(tmp_path, full("uniform", 1))
    in_pairs = kept_bytes(tmp_path, full("uniform", 2))
    assert in_pairs < one_by_one < selective < nothing
    assert one_by_one < nothing / 3
