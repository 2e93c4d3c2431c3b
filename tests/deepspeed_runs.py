"""Hugging Face models under deepspeed.initialize, as functions for `on_ranks`.

The judge of converted checkpoints: nothing of this package takes part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCAB = 90  # padded to 96 here
LENGTH = 32
STEPS = 3
States = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True)
class Setup:
    """A model and how DeepSpeed trains it."""

    model: str = "llama"
    tied: bool = False
    biases: bool = False
    stage: int = 1
    dtype: str = "fp32"
    two_groups: bool = False
    offload: bool = False
    round_robin: bool = False


@dataclass
class Trained:
    """What rank 0 saw."""

    saved: States = field(default_factory=dict)
    """(parameter, state) when the checkpoint was written, or right after loading."""
    after: States = field(default_factory=dict)
    """The same one step later."""
    logits: np.ndarray | None = None
    """Of `tokens(0)` when the checkpoint was written."""
    steps: int = 0
    samples: int = 0
    adam_step: int = 0
    loss_scale: float = 1.0
    """After that step."""


def section(setup: Setup) -> dict[str, Any]:
    """The model section of our config for the same model."""
    common = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": LENGTH,
        "vocab_size": VOCAB,
        "make_vocab_size_divisible_by": 8,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if setup.model == "gpt2":
        return common | {"ffn_hidden_size": 128}
    return common | {
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "rotary_base": 5000.0,
        "add_bias_linear": setup.biases,
        "untie_embeddings_and_output_weights": not setup.tied,
    }


def network(setup: Setup, config: Path | None = None) -> nn.Module:
    """The model with random weights of std 0.1, at which a layout error can't hide.

    Of `config`, a folder with a config.json, or of the setup.
    """
    torch.manual_seed(3)
    if config is not None:
        given = AutoConfig.from_pretrained(config, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        made: nn.Module = AutoModelForCausalLM.from_config(given)
    elif setup.model == "gpt2":
        made = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=3,
                n_head=4,
                n_positions=LENGTH,
                attn_pdrop=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
            )
        )
    else:
        made = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
                rms_norm_eps=1e-6,
                rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
                tie_word_embeddings=setup.tied,
                attention_bias=setup.biases,
                mlp_bias=setup.biases,
            )
        )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.1).add_(float(parameter.dim() == 1))
    return made


def tokens(number: int) -> Tensor:
    """The global batch of a step, [4, s]."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, VOCAB, (4, LENGTH), generator=generator)


def start(setup: Setup, config: Path | None = None, **checkpoint: Any) -> Any:
    """A DeepSpeed engine on the current process group."""
    module = network(setup, config)
    if setup.dtype != "fp32":
        module = module.to({"bf16": torch.bfloat16, "fp16": torch.float16}[setup.dtype])
    parameters: Any = list(module.parameters())
    if setup.two_groups:
        parameters = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
    zero: dict[str, Any] = {"stage": setup.stage, "round_robin_gradients": setup.round_robin}
    if setup.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    # torch's Adam counts steps in tensors, DeepSpeed's for the CPU in whole numbers.
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": not setup.offload}}
    settings = {
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "optimizer": adam,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2}},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "checkpoint": checkpoint,
    }
    if setup.dtype != "fp32":
        settings[setup.dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=parameters, config=settings, dist_init_required=False
    )
    return engine


def step(engine: Any, number: int) -> None:
    """One update; each rank has its own rows of the batch."""
    rows = tokens(number).chunk(dist.get_world_size())[dist.get_rank()]
    engine.backward(engine(input_ids=rows, labels=rows).loss)
    engine.step()


def states(engine: Any) -> States:
    """Master weights and moments as DeepSpeed itself gives them out; a collective call."""
    zero = engine.optimizer
    # DeepSpeed links parameters to Adam's states after the first group's first update, so those of
    # a second group would stay without.
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name, "fp32"] = safe_get_full_fp32_param(parameter).numpy().copy()
        for state in ("exp_avg", "exp_avg_sq"):
            whole = safe_get_full_optimizer_state(parameter, state)
            found[name, state] = whole.numpy().copy()
    return found


def train(setup: Setup, folder: Path) -> Trained:
    """Three steps, a checkpoint, and a fourth step."""
    engine = start(setup)
    for number in range(STEPS):
        step(engine, number)
    engine.save_checkpoint(str(folder))
    return _finish(engine)


def resume(setup: Setup, folder: Path) -> Trained:
    """Load a universal checkpoint into an engine with other weights, and take the fourth step.

    The model is made from the checkpoint's own config.json.
    """
    (universal,) = folder.glob("global_step*_universal")
    engine = start(setup, universal, load_universal=True)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_checkpoint(str(folder))
    return _finish(engine)


def _finish(engine: Any) -> Trained:
    result = Trained(saved=states(engine))
    with torch.no_grad():
        result.logits = engine.module(input_ids=tokens(0)).logits.float().numpy().copy()
    result.steps, result.samples = engine.global_steps, engine.global_samples
    adam = engine.optimizer.optimizer.state.values()
    result.adam_step = max(int(state["step"]) for state in adam)
    step(engine, STEPS)
    result.after, result.loss_scale = states(engine), float(engine.optimizer.loss_scale)
    engine.destroy()
    return result
