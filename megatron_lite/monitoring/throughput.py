"""Arithmetic of speed: FLOPs per token of a decoder, tokens per second, TFLOP/s and MFU.

Counts matrix products only (a multiplication and an addition are two FLOPs) and measures nothing.
Called by the trainer, planner and benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron_lite.config.sections.model import ModelConfig

MatrixType = Literal["fp16", "bf16", "tf32", "fp32"]


def attention_core_flops_per_token(model: ModelConfig) -> int:
    """Forward FLOPs of one layer's scores and weighted sum, per token, over the full square.

    The full square is counted though a causal kernel may skip half of it: the convention of
    Megatron and of most published MFU numbers, so that numbers can be compared.
    """
    query_size = model.num_attention_heads * model.kv_channels
    return 2 * 2 * model.seq_length * query_size


def layer_flops_per_token(model: ModelConfig) -> int:
    """Forward FLOPs of one transformer layer per token.

    Query and output projections are hidden x (heads x kv_channels), key and value hidden x
    (query groups x kv_channels) each; the MLP has two matrices, with SwiGLU three.
    """
    query_size = model.num_attention_heads * model.kv_channels
    key_value_size = model.num_query_groups * model.kv_channels
    attention_weights = model.hidden_size * (2 * query_size + 2 * key_value_size)
    mlp_weights = model.hidden_size * model.ffn_hidden_size * (3 if model.swiglu else 2)
    return 2 * (attention_weights + mlp_weights) + attention_core_flops_per_token(model)


def forward_flops_per_token(model: ModelConfig, *, vocab_size: int) -> int:
    """Forward FLOPs of the whole model per token: all layers and the output layer.

    `vocab_size` is the true one: columns that only pad the vocabulary are no useful work. The
    embedding is a lookup and counts nothing.
    Example: 4 layers, hidden 64, 8 heads, 2 query groups, SwiGLU of 128, sequence 32, vocabulary
    256: a layer has 2·64·(128 + 32) + 2·3·64·128 + 4·32·64 = 77,824, the head 2·64·256 = 32,768,
    together 344,064.
    """
    return model.num_layers * layer_flops_per_token(model) + 2 * model.hidden_size * vocab_size


def model_flops_per_token(model: ModelConfig, *, vocab_size: int) -> int:
    """Forward and backward: three times the forward (each product has two in its backward).

    Recomputation does not change it. The example above has 1,032,192. For GPT's shape this is the
    72 B s L h² (1 + s/6h + V/12hL) of arXiv:2205.05198.
    """
    return 3 * forward_flops_per_token(model, vocab_size=vocab_size)


def hardware_flops_per_token(
    model: ModelConfig,
    *,
    vocab_size: int,
    recompute_granularity: Literal["full", "selective"] | None,
) -> int:
    """Model FLOPs plus what recomputation repeats.

    Full: one more forward, so 4/3 of the model FLOPs. By convention that includes the head, which
    is not repeated, and takes every layer as recomputed, so it is an upper bound. Selective: the
    scores and the weighted sum of every layer once more.
    """
    forward = forward_flops_per_token(model, vocab_size=vocab_size)
    if recompute_granularity == "full":
        return 4 * forward
    if recompute_granularity == "selective":
        return 3 * forward + model.num_layers * attention_core_flops_per_token(model)
    return 3 * forward


def tokens_per_second(*, samples: int, seq_length: int, seconds: float) -> float:
    """Tokens that the whole job trained on per second.

    `samples` are those of all global batches within `seconds`; nothing depends on how ranks or
    micro-batches divide them. Divide by the world size for the share of one process.
    """
    return samples * seq_length / seconds


def tflops_per_gpu(*, tokens_per_second: float, flops_per_token: int, world_size: int) -> float:
    """10^12 FLOP/s of one process, from the job's tokens per second."""
    return tokens_per_second * flops_per_token / world_size / 1e12


def model_flops_utilization(tflops_per_gpu: float, peak_tflops: float | None) -> float | None:
    """MFU, the share (0 to 1) of the device's peak; None where the peak is unknown."""
    return None if peak_tflops is None else tflops_per_gpu / peak_tflops


# Dense matrix peaks (10^12 FLOP/s, no sparsity, fp32 accumulation where the sheet distinguishes it)
# from the vendors' data sheets. A key matches a device whose name has all of its words; of several,
# the one with most words counts, since variants of a chip differ by up to a third.
PEAK_TFLOPS: Mapping[str, Mapping[MatrixType, float]] = MappingProxyType(
    {
        "V100": {"fp16": 125.0, "fp32": 15.7},
        "V100 PCIE": {"fp16": 112.0, "fp32": 14.0},
        "T4": {"fp16": 65.0, "fp32": 8.1},
        "A10": {"fp16": 125.0, "bf16": 125.0, "tf32": 62.5, "fp32": 31.2},
        "A40": {"fp16": 149.7, "bf16": 149.7, "tf32": 74.8, "fp32": 37.4},
        "A100": {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0, "fp32": 19.5},
        "A800": {"fp16": 312.0, "bf16": 312.0, "tf32": 156.0, "fp32": 19.5},
        "L4": {"fp16": 121.0, "bf16": 121.0, "tf32": 60.0, "fp32": 30.3},
        "L40S": {"fp16": 362.0, "bf16": 362.0, "tf32": 183.0, "fp32": 91.6},
        "RTX 4090": {"fp16": 165.2, "bf16": 165.2, "tf32": 82.6, "fp32": 82.6},
        "H100": {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
        "H100 PCIE": {"fp16": 756.0, "bf16": 756.0, "tf32": 378.0, "fp32": 51.0},
        "H100 NVL": {"fp16": 835.0, "bf16": 835.0, "tf32": 417.5, "fp32": 60.0},
        "H800": {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
        "H200": {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
        "H200 NVL": {"fp16": 835.0, "bf16": 835.0, "tf32": 417.5, "fp32": 60.0},
        "GH200": {"fp16": 989.4, "bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
        "B200": {"fp16": 2250.0, "bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0},
        "MI250X": {"fp16": 191.5, "bf16": 191.5, "fp32": 47.9},  # of one of its two dies
        "MI300X": {"fp16": 1307.4, "bf16": 1307.4, "tf32": 653.7, "fp32": 163.4},
    }
)


def peak_tflops(device_name: str, dtype: MatrixType) -> float | None:
    """Peak of a device by the name that torch gives it, in 10^12 FLOP/s; None when unknown.

    None as well for a type that the device's matrix units don't have (bf16 on a V100).
    Example: "NVIDIA A100-SXM4-80GB" with bf16 is 312.0; "cpu" is None.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    found = [key for key in PEAK_TFLOPS if words.issuperset(key.split())]
    if not found:
        return None
    return PEAK_TFLOPS[max(found, key=lambda key: len(key.split()))].get(dtype)
