"""Megatron's own model judges: its logits, and those of ours with the weights that it saved.

Skipped where megatron-core is not installed (`pip install --no-deps megatron-core==0.16.1`).
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megatron_lite.convert import foreign, megatron
from megatron_lite.convert.target import Target
from tests.checkpoints import read
from tests.distributed.models import GPT, LLAMA, write_config
from tests.distributed.ranks import on_ranks
from tests.logits import logits_of

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
SMALL = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
SMALL_LLAMA = LLAMA | SMALL | {"num_query_groups": 2, "ffn_hidden_size": 48, "rotary_base": 5000.0}
SECTIONS = {
    "llama": SMALL_LLAMA,
    "normed llama": SMALL_LLAMA | {"qk_layernorm": True},
    "gpt": GPT | SMALL,
}
TOKENS = torch.arange(64).view(2, 32) * 37 % 90


def build(kind: str, tp: int, interleaved: bool) -> Any:
    """A GPTModel of megatron-core on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    parallel_state.initialize_model_parallel(tp, 1)
    llama = kind != "gpt"
    draw = partial(torch.nn.init.normal_, std=0.1)
    activation = F.silu if llama else partial(F.gelu, approximate="tanh")
    normed = kind == "normed llama"  # query and key, head by head
    config = TransformerConfig(
        **SMALL,
        qk_layernorm=normed,
        num_query_groups=2 if llama else 4,
        ffn_hidden_size=48 if llama else 128,
        gated_linear_unit=llama,
        activation_func=activation,
        add_bias_linear=not llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        rotary_interleaved=interleaved,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        init_method=draw,
        output_layer_init_method=draw,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm" if llama else None, qk_layernorm=normed),
        vocab_size=96,
        max_sequence_length=32,
        position_embedding_type="rope" if llama else "learned_absolute",
        share_embeddings_and_output_weights=not llama,
        rotary_base=5000,
    )


def save_and_run(kind: str, interleaved: bool, folder: Path) -> np.ndarray:
    """Save the model with random norms, and return its logits on `TOKENS`."""
    tp, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(5)
    model = build(kind, tp, interleaved).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and not getattr(parameter, "tensor_model_parallel", False):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        mask = torch.triu(torch.ones(32, 32, dtype=torch.bool), 1)[None, None]
        own = model(TOKENS, torch.arange(32).expand(2, -1), mask).contiguous()
    parts = [torch.empty_like(own) for _ in range(tp)]
    dist.all_gather(parts, own)
    path = folder / "iter_0000005" / f"mp_rank_{rank:02d}"
    path.mkdir(parents=True)
    content = {
        "args": Namespace(**SMALL, rotary_interleaved=interleaved),
        "checkpoint_version": 3.0,
        "iteration": 5,
        "model": model.state_dict_for_save_checkpoint(),
    }
    torch.save(content, path / "model_optim_rng.pt")
    return torch.cat(parts, -1)[..., :90].numpy()


@pytest.mark.parametrize(
    ("kind", "tp", "interleaved"),
    [("llama", 1, False), ("normed llama", 2, True), ("gpt", 2, False)],
)
def test_logits(tmp_path: Path, kind: str, tp: int, interleaved: bool) -> None:
    expected = on_ranks(tp, save_and_run, kind, interleaved, tmp_path)[0]
    config = write_config(tmp_path / "run.json", tmp_path, SECTIONS[kind])
    target = Target.read(config)
    folder = foreign.write(tmp_path / "ours", target, megatron.read(tmp_path, target, step=5))
    found = logits_of(target, read(folder), TOKENS)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-4)
