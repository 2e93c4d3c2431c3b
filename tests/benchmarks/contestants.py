"""One contestant of train_step.py in a process of its own: `contestants.py SPEC`.

SPEC is JSON {contestant, shape, folder, compile}. It answers each line on stdin with a line of JSON on
stdout: "step" trains one step, "matmul" measures the machine, "peak" tells the largest memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from work import CLIP, LEARNING_RATE, WEIGHT_DECAY, Shape

Step = Callable[[], float]
"""Train one step; returns its loss."""


def plain(shape: Shape, spec: dict[str, Any]) -> Step:
    """The bare PyTorch model."""
    from plain_gpt import PlainGPT

    model = PlainGPT(shape).to(torch.bfloat16)
    if spec["compile"]:
        model.compile()
    return _peer(model, shape)


def hugging_face(shape: Shape, spec: dict[str, Any]) -> Step:
    """LlamaForCausalLM with SDPA; the library shifts the labels and upcasts the logits itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.seq_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if spec["compile"]:
        model.compile()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

    return _peer(Loss(), shape)


def _peer(model: nn.Module, shape: Shape) -> Step:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        size = (shape.micro_batch_size, shape.seq_length + 1)
        batch = torch.randint(shape.vocab, size, generator=generator)
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    return step


def ours(shape: Shape, spec: dict[str, Any]) -> Step:
    """megatron_lite from a config file through its own trainer: loader, executor, ZeRO-1."""
    from megatron_lite.build import Place, build_grid, build_trainer
    from megatron_lite.config.load import load_config
    from megatron_lite.mpu.groups import ProcessGroups

    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(spec["folder"])
    overrides = [
        f"parallel.tensor_model_parallel_size={world_size}",
        f"training.compile={json.dumps(spec['compile'])}",
        *spec.get("overrides", ()),
    ]
    loaded = load_config(folder / "config.json", overrides, world_size)
    groups = ProcessGroups.create(build_grid(loaded.config, rank=rank, world_size=world_size))
    trainer = build_trainer(loaded.config, Place(groups, torch.device("cpu"), folder / "run"))
    losses: list[float] = []

    def step() -> float:
        trainer._iteration(1 << 30)
        return 0.0

    step.trainer = trainer
    return step


CONTESTANTS = {"ours": ours, "plain": plain, "hugging_face": hugging_face}


def peak_bytes() -> int:
    """The process's largest resident set so far (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def matmul_tflops(size: int = 2048, seconds: float = 0.5) -> float:
    """10^12 FLOP/s of a square bf16 product on this process's threads."""
    a, b = torch.randn(2, size, size).bfloat16()
    out = torch.mm(a, b)
    done, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        torch.mm(a, b, out=out)
        done += 1
    return 2 * size**3 * done / passed / 1e12


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print goes to the log
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape = Shape(**spec["shape"])
    step = CONTESTANTS[spec["contestant"]](shape, spec)
    for line in sys.stdin:
        started = time.perf_counter()
        match line.strip():
            case "step":
                answer = {"loss": step(), "seconds": time.perf_counter() - started}
            case "peak":
                answer = {"bytes": peak_bytes()}
            case "matmul":
                answer = {"tflops": matmul_tflops()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
