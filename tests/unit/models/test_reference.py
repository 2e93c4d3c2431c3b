"""One forward and backward of our models against Hugging Face's with the same weights, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_lite.config.load import load_config
from megatron_lite.data.loader import MicroBatch
from megatron_lite.layers.context import LayerContext
from megatron_lite.models.gpt import GPTStage
from tests.distributed.models import GPT, LLAMA, write_config
from tests.hugging_face import as_gpt2, as_llama, gpt2, llama
from tests.logical import fill, gradient, logical_parts, random_values

VOCAB = 90  # padded to 96
CASES = {
    "llama": (LLAMA | {"rotary_base": 5000.0}, llama, as_llama),
    "gpt2": (GPT | {"max_position_embeddings": 48}, gpt2, as_gpt2),
}


def tensors(stage: GPTStage, **options: object) -> dict[str, Tensor]:
    return {n: torch.from_numpy(v) for n, v in logical_parts(stage, **options).items()}  # type: ignore[arg-type]


def batch() -> MicroBatch:
    """Two sequences of 32, a third of the tokens without weight."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, 33), generator=generator)
    mask = (torch.arange(64).view(2, 32) % 3 > 0).float()
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], mask)


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(tmp_path: Path, name: str) -> None:
    section, make, rename = CASES[name]
    path = write_config(tmp_path / "run.json", tmp_path / "none", section)
    model = load_config(path, [], 1).config.model
    count = model.num_layers
    stage = GPTStage(model, LayerContext(seed=1), layers=range(count), vocab_size=VOCAB)
    # Biases and norms start as constants, which would hide a swapped pair.
    fill(stage, {n: 0.1 * v + (v.dim() == 1) for n, v in random_values(stage).items()})
    theirs = make(model, tensors(stage), vocab_size=VOCAB)

    logits: list[Tensor] = []

    def look(head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        logits.append(head.logits(inputs[0]).detach())  # type: ignore[operator]

    stage.head.register_forward_pre_hook(look)
    data = batch()
    loss = stage(data)
    loss.backward()
    expected = theirs(input_ids=data.tokens).logits.flatten(0, 1)
    losses = F.cross_entropy(expected, data.labels.flatten(), reduction="none")
    expected_loss = (losses * data.loss_mask.flatten()).sum()
    expected_loss.backward()

    torch.testing.assert_close(logits[0][:, :VOCAB], expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    ours = rename(tensors(stage, of=gradient), count)
    for key, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            ours[key],
            parameter.grad,
            rtol=1e-3,
            atol=1e-4 * scale,
            msg=lambda text, key=key: f"{key}: {text}",
        )
