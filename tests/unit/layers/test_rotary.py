"""Rotary embedding against the one of Hugging Face's LLaMA, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_lite.layers.rotary import apply_rotary, rotary_tables

BATCH, LENGTH, HEADS, CHANNELS, BASE = 2, 24, 3, 16, 5000.0


def tables(length: int, dim: int) -> tuple[Tensor, Tensor]:
    return rotary_tables(length, dim, base=BASE, device=torch.device("cpu"))


def llama(x: Tensor) -> Tensor:
    """[b, s, heads, d] rotated by transformers."""
    config = LlamaConfig(
        hidden_size=CHANNELS,
        num_attention_heads=1,
        head_dim=x.shape[-1],
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
    rotated, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    return rotated


def sample(channels: int = CHANNELS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, LENGTH, HEADS, channels, generator=generator)


def gradient_of(rotate, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Output, and gradient of x under a fixed random gradient of the output."""
    leaf = x.clone().requires_grad_()
    output = rotate(leaf)
    output.backward(sample(x.shape[-1]).flip(0))
    assert leaf.grad is not None
    return output.detach(), leaf.grad


def test_equal_to_llama() -> None:
    cos, sin = tables(LENGTH, CHANNELS)
    found = gradient_of(lambda x: apply_rotary(x, cos, sin), sample())
    expected = gradient_of(llama, sample())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_part_of_the_head_is_rotated_and_the_rest_passes() -> None:
    rotated = CHANNELS // 2
    cos, sin = tables(LENGTH, rotated)
    output, grad = gradient_of(lambda x: apply_rotary(x, cos, sin), sample())
    expected, _ = gradient_of(llama, sample()[..., :rotated])
    torch.testing.assert_close(output[..., :rotated], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(output[..., rotated:], sample()[..., rotated:])
    assert torch.equal(grad[..., rotated:], sample().flip(0)[..., rotated:])


def test_scores_depend_on_distance_only() -> None:
    cos, sin = tables(LENGTH, CHANNELS)
    query, key = sample()[:1, :1, :1].double().expand(2, LENGTH, 1, CHANNELS).unbind(0)
    query, key = query[None], key[None].flip(-1)
    scores = torch.einsum(
        "bind,bjnd->ij", apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
    )
    for distance in range(LENGTH):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert scores[:, 0].std() > 0.1
