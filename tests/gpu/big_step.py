"""A bf16 training step of a large LLaMA-shaped model on one GPU, with and without ZeRO-Offload.

Prints a table and, as the last line, a JSON object: tokens/s, TFLOP/s and MFU against the bf16
matrix-product peak measured here, and memory. Run by run.sh; needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 768, "heads": 4},
    "1b": {"num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 5632, "heads": 16},
    "3b": {"num_layers": 26, "hidden_size": 3072, "ffn_hidden_size": 8192, "heads": 24},
}
SEQUENCE, VOCABULARY = 2048, 32000


def config_of(size: str, *, offload: str, micro_batch_size: int, iterations: int) -> dict[str, Any]:
    """A complete config on random tokens."""
    shape = SIZES[size]
    return {
        "model": {
            "num_layers": shape["num_layers"],
            "hidden_size": shape["hidden_size"],
            "ffn_hidden_size": shape["ffn_hidden_size"],
            "num_attention_heads": shape["heads"],
            "seq_length": SEQUENCE,
            "vocab_size": VOCABULARY,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
        "training": {
            "micro_batch_size": micro_batch_size,
            "global_batch_size": micro_batch_size,
            "train_iters": iterations,
        },
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "bf16"},
        "deepspeed": {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": offload, "pin_memory": offload == "cpu"},
            }
        },
        "data": {"data_path": "corpus", "split": "1,0,0"},
        "logging": {"log_interval": 1, "tensorboard_dir": None},
    }


def write_corpus(folder: Path) -> None:
    """Two million random tokens."""
    import numpy as np

    from megatron_lite.data.indexed_builder import IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(folder / "corpus"), np.uint16)
    for _ in range(200):
        builder.add_document(rng.integers(0, VOCABULARY, 10_000))
    builder.finalize()


def matmul_peak() -> float:
    """TFLOP/s of the best bf16 product of two 8,192 × 8,192 matrices."""
    import torch

    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best / 1e12


def run_one(size: str, offload: str, micro_batch_size: int, iterations: int) -> dict[str, Any]:
    """Train in a process of its own, so that memory is this run's alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        config = config_of(
            size, offload=offload, micro_batch_size=micro_batch_size, iterations=iterations
        )
        (folder / "run.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "megatron_lite.train", str(folder / "run.json")]
        done = subprocess.run(
            [*command, "--run-dir", str(folder / "run")], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{size}, offload {offload} failed:\n{done.stdout}\n{done.stderr}")
        rows = [json.loads(r) for r in (folder / "run/metrics.jsonl").read_text().splitlines()]
        memory = float(done.stdout.split("peak memory (MiB):")[1].split("|")[0])
    settled = rows[len(rows) // 3 :]
    return {
        "tokens_per_second": statistics.median(r["tokens_per_second"] for r in settled),
        "tflops": statistics.median(r["tflops_per_gpu"] for r in settled),
        "first_loss": rows[0]["lm_loss"],
        "last_loss": rows[-1]["lm_loss"],
        "peak_memory_mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=12)
    args = parser.parse_args()
    peak = matmul_peak()
    print(f"bf16 matrix-product peak measured: {peak:.0f} TFLOP/s")
    result: dict[str, Any] = {"size": args.size, "matmul_peak_tflops": peak}
    for offload in ("none", "cpu"):
        found = run_one(args.size, offload, args.micro_batch_size, args.iterations)
        found["mfu"] = found["tflops"] / peak
        result[f"offload_{offload}"] = found
        print(
            f"offload {offload:>4}: {found['tokens_per_second']:10.0f} tokens/s "
            f"{found['tflops']:7.1f} TFLOP/s  MFU {found['mfu']:.3f}  "
            f"memory {found['peak_memory_mib']:8.0f} MiB  "
            f"loss {found['first_loss']:.3f} → {found['last_loss']:.3f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
