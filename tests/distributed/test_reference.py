"""The quickstart's model trained by us and by Hugging Face's LLaMA with plain PyTorch.

The reference shares our initial weights and the samples, and nothing else: its model, loss, AdamW,
clipping and schedule are written here from their definitions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron_lite.build import build_run_datasets
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import RunConfig
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from tests.distributed.plain import whole_model
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, merged, train
from tests.hugging_face import as_llama, llama
from tests.logical import logical_parts

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "run" / "quickstart.json"
STEPS, BATCH, VOCAB = 20, 4, 4096


def write_text_like_corpus(prefix: Path) -> Path:
    """A walk on 4,096 tokens, some more frequent, in which some pairs follow each other often."""
    rng = np.random.default_rng(1)
    follower = rng.integers(0, VOCAB, VOCAB)
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for _ in range(30):
        tokens = (VOCAB * rng.random(300) ** 6).astype(np.int64)
        for i in range(1, len(tokens)):
            if rng.random() < 0.3:
                tokens[i] = follower[tokens[i - 1]]
        builder.add_document(tokens)
    builder.finalize()
    return prefix


def overrides(corpus: Path) -> list[str]:
    """The quickstart on one process, with small batches of short sequences, in float32."""
    return [
        f"model.vocab_size={VOCAB}",
        "model.seq_length=64",
        "parallel.tensor_model_parallel_size=1",
        "parallel.pipeline_model_parallel_size=1",
        "launch.gpus_per_node=1",
        "training.micro_batch_size=2",
        f"training.global_batch_size={BATCH}",
        f"training.train_iters={STEPS}",
        "training.eval_interval=0",
        # Gentle: a jump of the gradient's norm to a hundred would magnify roundings a thousandfold.
        "optimizer.lr=5e-4",
        "optimizer.min_lr=5e-5",
        "precision.dtype=fp32",
        "deepspeed.zero_optimization.stage=1",
        'deepspeed.zero_optimization.offload_optimizer={"device": "none"}',
        f"data.data_path={corpus}",
        "data.tokenizer_type=NullTokenizer",
        "data.tokenizer_model=null",
        "checkpoint.save=null",
        "logging.log_interval=1",
        "logging.tensorboard_dir=null",
    ]


@dataclass
class Reference:
    losses: list[float]
    norms: list[float]
    first: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def rate_of(update: int, config: RunConfig) -> float:
    """Linear warm-up over a tenth of the run, then half a cosine down to min_lr."""
    optimizer = config.optimizer
    assert optimizer.lr_decay_style == "cosine"
    assert optimizer.lr_warmup_fraction == 0.1
    warm_up = 0.1 * STEPS
    if update <= warm_up:
        return optimizer.lr * update / warm_up
    share = (1 + math.cos(math.pi * (update - warm_up) / (STEPS - warm_up))) / 2
    return optimizer.min_lr + share * (optimizer.lr - optimizer.min_lr)


def clip(parameters: list[torch.nn.Parameter]) -> float:
    """Scale the gradient down to norm 1; returns its norm, added up in double precision."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    for gradient in gradients:
        gradient *= min(1.0, 1.0 / norm)
    return norm


def plain_training(config: RunConfig) -> Reference:
    """Twenty steps of LlamaForCausalLM in plain PyTorch."""
    first = logical_parts(whole_model(config, vocab_size=VOCAB))
    values = {name: torch.from_numpy(part) for name, part in first.items()}
    samples = build_run_datasets(config, vocab_size=VOCAB).train
    model = llama(config.model, values, vocab_size=VOCAB)
    named = dict(model.named_parameters())
    adam = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "norm" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for step in range(STEPS):
        rows = np.stack([samples[k] for k in range(step * BATCH, (step + 1) * BATCH)])
        tokens = torch.from_numpy(rows)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        norms.append(clip(list(named.values())))
        for group in adam.param_groups:
            group["lr"] = rate_of(step + 1, config)
        adam.step()
        losses.append(loss.item())
    return Reference(losses, norms, values, {n: p.detach() for n, p in named.items()})


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Reference, RunConfig]:
    folder = tmp_path_factory.mktemp("reference")
    corpus = write_text_like_corpus(folder / "corpus")
    config = load_config(QUICKSTART, overrides(corpus), 1).config
    ours = on_ranks(1, train, QUICKSTART, overrides(corpus), folder, watchdog=300)[0]
    return ours, plain_training(config), config


def test_losses_agree_for_twenty_steps(both: tuple[Result, Reference, RunConfig]) -> None:
    ours, reference, config = both
    assert (config.model.num_layers, config.model.hidden_size) == (8, 256)
    assert len(ours.losses) == STEPS
    assert ours.losses == pytest.approx(reference.losses, abs=1e-4)
    assert reference.losses[-1] < reference.losses[0] - 1, "nothing was learnt"


def test_norms_and_weights_agree(both: tuple[Result, Reference, RunConfig]) -> None:
    ours, reference, config = both
    assert ours.norms == pytest.approx(reference.norms, rel=1e-3)
    assert max(reference.norms) > 1.2, "nothing was clipped"
    trained = {n: torch.from_numpy(v) for n, v in merged([ours.weights]).items()}
    for name, weight in as_llama(trained, config.model.num_layers).items():
        start = as_llama(reference.first, config.model.num_layers)[name]
        moved = (reference.weights[name] - start).abs().mean()
        apart = (reference.weights[name] - weight).abs().mean()
        assert apart < 0.02 * moved, name
