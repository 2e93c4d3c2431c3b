"""FLOPs against numbers counted by hand and against torch's own count; peaks by device name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.config.sections.model import ModelConfig
from megatron_lite.monitoring.throughput import (
    forward_flops_per_token,
    hardware_flops_per_token,
    model_flops_per_token,
    model_flops_utilization,
    peak_tflops,
    tflops_per_gpu,
    tokens_per_second,
)


def model(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 128,
        "swiglu": True,
        "seq_length": 32,
    }
    return ModelConfig(**{**sizes, **changes})


def test_b54_flops_of_a_gated_grouped_model() -> None:
    assert forward_flops_per_token(model(), vocab_size=256) == 344_064
    assert model_flops_per_token(model(), vocab_size=256) == 1_032_192


def test_b54_full_recompute_changes_hardware_flops_only() -> None:
    full = hardware_flops_per_token(model(), vocab_size=256, recompute_granularity="full")
    none = hardware_flops_per_token(model(), vocab_size=256, recompute_granularity=None)
    assert none == model_flops_per_token(model(), vocab_size=256)
    assert 3 * full == 4 * none


def test_selective_recompute_repeats_scores_and_weighted_sum() -> None:
    """4 layers x 2 products x 2 x 32 positions x 64 columns of query."""
    extra = 4 * 2 * 2 * 32 * 64
    selective = hardware_flops_per_token(model(), vocab_size=256, recompute_granularity="selective")
    assert selective == 1_032_192 + extra


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "seq", "vocab"),
    [(24, 2304, 24, 2048, 51200), (96, 12288, 96, 2048, 51200)],
)
def test_gpt_shape_gives_the_published_formula(
    layers: int, hidden: int, heads: int, seq: int, vocab: int
) -> None:
    """72 s L h^2 (1 + s/6h + V/12hL) for a sequence (arXiv:2205.05198), here for one token."""
    gpt = model(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=4 * hidden,
        swiglu=False,
        seq_length=seq,
    )
    published = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    assert model_flops_per_token(gpt, vocab_size=vocab) == pytest.approx(published, rel=1e-12)


def test_forward_count_agrees_with_torch() -> None:
    """The matrix products of a layer and head, written out and counted by torch."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config = model(num_layers=1, seq_length=16, kv_channels=4, num_query_groups=4)
    s, h, heads, groups, d, ffn, vocab = 16, 64, 8, 4, 4, 128, 96
    x = torch.randn(s, h)
    with FlopCounterMode(display=False) as counter:
        query = (x @ torch.randn(h, heads * d)).view(s, heads, d).transpose(0, 1)
        key = (x @ torch.randn(h, groups * d)).view(s, groups, d).transpose(0, 1)
        value = (x @ torch.randn(h, groups * d)).view(s, groups, d).transpose(0, 1)
        key, value = (t.repeat_interleave(heads // groups, dim=0) for t in (key, value))
        mixed = torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)
        out = mixed.transpose(0, 1).reshape(s, heads * d) @ torch.randn(heads * d, h)
        inner = (out @ torch.randn(h, ffn)).sigmoid() * (out @ torch.randn(h, ffn))
        (inner @ torch.randn(ffn, h)) @ torch.randn(h, vocab)
    assert counter.get_total_flops() == s * forward_flops_per_token(config, vocab_size=vocab)


def test_b54_tokens_per_second_of_the_job() -> None:
    assert tokens_per_second(samples=12, seq_length=32, seconds=2.0) == 192.0


def test_tflops_are_shared_among_processes() -> None:
    value = tflops_per_gpu(tokens_per_second=2e6, flops_per_token=3_000_000, world_size=4)
    assert value == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("cpu", "bf16", None),
        ("NVIDIA GeForce GTX 1080", "fp16", None),
    ],
)
def test_peak_by_device_name(name: str, dtype: Any, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak


def test_mfu_is_unknown_without_a_peak() -> None:
    assert model_flops_utilization(156.0, 312.0) == 0.5
    assert model_flops_utilization(156.0, None) is None
