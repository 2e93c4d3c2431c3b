"""What only a GPU can show: NCCL, flash attention, pinned offload, TF32, compilation, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.models import GPT, LLAMA, write_config, write_corpus

pytestmark = pytest.mark.gpu

SIXTEEN_BIT_LLAMA = LLAMA | {"hidden_size": 512, "kv_channels": 64, "ffn_hidden_size": 1024}


def train(folder: Path, model: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """Train in a process of its own; returns the rows of metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = write_corpus(folder / "corpus")
    config = write_config(folder / "run.json", corpus, model, **sections)
    command = [sys.executable, "-m", "megatron_lite.train", str(config)]
    done = subprocess.run(
        [*command, "--run-dir", str(folder / "run")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(row) for row in (folder / "run/metrics.jsonl").read_text().splitlines()]


def on_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], **sections: Any
) -> Any:
    """The same run with the GPU hidden."""
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        return train(folder, model, **sections)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_fp32_equals_the_cpu(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_cpu(tmp_path / "cpu", monkeypatch, model)
    found = train(tmp_path / "gpu", model)
    assert found[0]["lm_loss"] == pytest.approx(expected[0]["lm_loss"], rel=1e-5)
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-4)
    assert found[-1]["lm_loss"] == pytest.approx(expected[-1]["lm_loss"], rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_bf16_follows_fp32(stage: int, offload: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "fp32", SIXTEEN_BIT_LLAMA)
    zero = {"stage": stage, "offload_optimizer": {"device": offload, "pin_memory": True}}
    if offload == "none":
        zero = {"stage": stage}
    found = train(
        tmp_path / "bf16",
        SIXTEEN_BIT_LLAMA,
        precision={"dtype": "bf16"},
        deepspeed={"zero_optimization": zero},
    )
    assert found[-1]["lm_loss"] == pytest.approx(expected[-1]["lm_loss"], rel=3e-2)
    assert found[-1]["lm_loss"] < found[0]["lm_loss"]


def test_fp16_scales_its_loss(tmp_path: Path) -> None:
    rows = train(
        tmp_path,
        SIXTEEN_BIT_LLAMA,
        precision={"dtype": "fp16", "loss_scale_window": 4},
        deepspeed={"zero_optimization": {"stage": 2}},
    )
    assert rows[-1]["loss_scale"] > rows[0]["loss_scale"]
    assert rows[-1]["lm_loss"] < rows[0]["lm_loss"]


def test_tf32_is_switched_by_the_config(tmp_path: Path) -> None:
    wide = LLAMA | {"hidden_size": 512, "kv_channels": 64, "ffn_hidden_size": 1024}
    exact = train(tmp_path / "fp32", wide)
    rounded = train(tmp_path / "tf32", wide, precision={"dtype": "fp32", "tf32": True})
    assert rounded[0]["lm_loss"] != exact[0]["lm_loss"]
    assert rounded[0]["lm_loss"] == pytest.approx(exact[0]["lm_loss"], rel=1e-2)


def test_compiled_layers_agree(tmp_path: Path) -> None:
    eager = train(tmp_path / "eager", LLAMA)
    training = {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 10, "compile": True}
    compiled = train(tmp_path / "compiled", LLAMA, training=training)
    assert compiled[-1]["lm_loss"] == pytest.approx(eager[-1]["lm_loss"], rel=1e-3)


def test_packed_documents_equal_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by workers, by way of pinned memory."""
    data = {"reset_position_ids": True, "reset_attention_mask": True}
    expected = on_cpu(tmp_path / "cpu", monkeypatch, LLAMA, data=data)
    found = train(tmp_path / "gpu", LLAMA, data=data | {"num_workers": 2})
    assert found[0]["lm_loss"] == pytest.approx(expected[0]["lm_loss"], rel=1e-5)
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-4)
    assert found[-1]["data_wait_ms_per_iteration"] < 5


@pytest.mark.parametrize("packed", [False, True])
def test_attention_takes_a_fused_kernel(packed: bool) -> None:
    """Flash, or with a mask for packed documents, which flash can't take, the memory-efficient."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megatron_lite.config.schema import ModelConfig
    from megatron_lite.layers.attention import SelfAttention
    from megatron_lite.layers.context import Init, LayerContext
    from megatron_lite.layers.packing import Packing, document_mask
    from megatron_lite.mpu.random import RngStreams

    device = torch.device("cuda")
    model = ModelConfig(**SIXTEEN_BIT_LLAMA, max_position_embeddings=32, add_qkv_bias=False)
    context = LayerContext(device=device, dtype=torch.bfloat16, streams=RngStreams(device))
    attention = SelfAttention(
        model, context, "attention", output_init=Init(std=0.1), recompute_core=False
    )
    hidden = torch.randn(2 * 32, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    kernel, packing = SDPBackend.FLASH_ATTENTION, Packing()
    if packed:
        ids = torch.arange(64, device=device).view(2, 32) // 10
        kernel, packing = (
            SDPBackend.EFFICIENT_ATTENTION,
            Packing(None, document_mask(ids, hidden.dtype)),
        )
    with sdpa_kernel(kernel):  # raises where the kernel can't take the inputs
        attention(hidden, 2, packing).sum().backward()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
