"""One contestant of train_step.py in a process of its own: `contestants.py SPEC`.

SPEC is JSON {contestant, shape, compile, folder, run_dir}. It answers each line on stdin with a
line of JSON: "step" trains one step, "matmul" measures the machine, "peak" tells the memory.
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
from torch import Tensor, nn
from work import CLIP, LEARNING_RATE, WEIGHT_DECAY, Shape

Step = Callable[[], None]


def plain(shape: Shape, spec: dict[str, Any]) -> Step:
    """The bare PyTorch model."""
    from plain_gpt import PlainGPT

    model = PlainGPT(shape).to(torch.bfloat16)
    if spec["compile"]:
        model.compile()
    return _peer(model, shape, lambda tokens: model(tokens[:, :-1], tokens[:, 1:]))


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

    def loss(tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1]
        out: Tensor = model(input_ids=inputs, labels=inputs).loss
        return out

    return _peer(model, shape, loss)


def _peer(model: nn.Module, shape: Shape, loss: Callable[[Tensor], Tensor]) -> Step:
    """A training loop as people write it, on random tokens [b, s + 1]."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    generator = torch.Generator().manual_seed(1)
    size = (shape.micro_batch_size, shape.seq_length + 1)

    def step() -> None:
        tokens = torch.randint(shape.vocab, size, generator=generator)
        optimizer.zero_grad(set_to_none=True)
        loss(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def ours(shape: Shape, spec: dict[str, Any]) -> Step:
    """megatron_lite from a config file by its own trainer: loader, executor, ZeRO-1, log."""
    from megatron_lite.build import build_trainer
    from megatron_lite.build_model import Place, build_grid
    from megatron_lite.config.batch import train_iters
    from megatron_lite.config.load import load_config
    from megatron_lite.session import join, meet

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    overrides = [
        f"parallel.tensor_model_parallel_size={world_size}",
        f"training.compile={json.dumps(spec['compile'])}",
    ]
    loaded = load_config(Path(spec["folder"]) / "config.json", overrides, world_size)
    device, store = meet(loaded, rank=rank, local_rank=rank)
    grid = build_grid(loaded.config, rank=rank, world_size=world_size)
    groups = join(loaded, grid, store, device)
    run_dir = Path(spec["run_dir"])
    run_dir.mkdir(exist_ok=True)
    trainer = build_trainer(loaded.config, Place(groups, device, run_dir))
    total = train_iters(loaded.config.training)
    return lambda: trainer.iteration(total)


CONTESTANTS = {"ours": ours, "plain": plain, "hugging_face": hugging_face}


def peak_bytes() -> int:
    """The process's largest resident set so far (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def matmul_tflops(size: int = 2048, repetitions: int = 8) -> float:
    """10^12 FLOP/s of a square bf16 product on this process's threads, the best of a few."""
    a, b = torch.randn(2, size, size).bfloat16()
    out = torch.mm(a, b)
    best = float("inf")
    for _ in range(repetitions):
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e12


def main() -> None:
    """Answer commands until the pipe is closed."""
    spec = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the log
    step = CONTESTANTS[spec["contestant"]](Shape(**spec["shape"]), spec)
    for line in sys.stdin:
        answer: dict[str, Any]
        match line.strip():
            case "step":
                started, used = time.perf_counter(), time.process_time()
                step()
                answer = {
                    "seconds": time.perf_counter() - started,
                    "cpu_seconds": time.process_time() - used,
                }
            case "peak":
                answer = {"bytes": peak_bytes()}
            case "matmul":
                answer = {"tflops": matmul_tflops()}
            case unknown:
                raise ValueError(f"no such command: {unknown}")
        print(json.dumps(answer), file=answers, flush=True)
    # Skips destructors of process groups whose peers may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
