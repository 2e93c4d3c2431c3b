"""The lines that a run prints, in the format that people's scripts search for.

Pure text: prints nothing itself and holds no state. Called by the trainer.
"""

from __future__ import annotations

from megatron_lite.monitoring.metrics import (
    CheckpointMetrics,
    EvaluationMetrics,
    StepMetrics,
    perplexity,
)


def train_line(row: StepMetrics, *, train_iters: int) -> str:
    """The line of one log step, with Megatron's names and widths; no grad norm when it is None."""
    parts = [
        f"iteration {row.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {row.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {row.elapsed_ms_per_iteration:.1f}",
        f"tokens per second: {row.tokens_per_second:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {row.tflops_per_gpu:.1f}",
        f"learning rate: {row.learning_rate:.6E}",
        f"global batch size: {row.global_batch_size:5d}",
        f"lm loss: {row.lm_loss:.6E}",
        f"loss scale: {row.loss_scale:.1f}",
        *([] if row.grad_norm is None else [f"grad norm: {row.grad_norm:.3f}"]),
        f"number of skipped iterations: {row.skipped_iterations:3d}",
        f"number of nan iterations: {row.nan_iterations:3d}",
    ]
    return _line(parts)


def sources_line(row: StepMetrics) -> str:
    """How many samples each source of the training data has given."""
    counts = [f"{name}: {count}" for name, count in row.source_samples.items()]
    return _line([f"samples of each source at iteration {row.iteration}", *counts])


def straggler_line(row: StepMetrics) -> str:
    """Which rank is clearly slower than the others (stragglers.CLEARLY)."""
    parts = [
        f"slowest rank at iteration {row.iteration}",
        f"rank: {row.slowest_rank}",
        f"its forward and backward took: {row.slowest_rank_ratio:.2f} x the others' median",
        f"and of an iteration (%): {100 * row.slowest_rank_share:.0f}",
    ]
    return _line(parts)


def evaluation_line(row: EvaluationMetrics) -> str:
    """The line of a validation or test; the perplexity's loss is capped (metrics.perplexity)."""
    name = {"valid": "validation", "test": "test"}[row.event]
    parts = [
        f"{name} loss at iteration {row.iteration}",
        f"consumed samples: {row.consumed_samples:12d}",
        f"lm loss value: {row.lm_loss:.6E}",
        f"lm loss PPL: {perplexity(row.lm_loss):.6E}",
        f"elapsed time (ms): {row.elapsed_ms:.1f}",
    ]
    return _line(parts)


def checkpoint_line(row: CheckpointMetrics) -> str:
    """The line of a checkpoint that was written or read."""
    name = {"save": "saved", "load": "loaded"}[row.event]
    parts = [
        f"{name} checkpoint at iteration {row.iteration}",
        f"consumed samples: {row.consumed_samples:12d}",
        f"elapsed time (ms): {row.elapsed_ms:.1f}",
        f"training waited (ms): {row.waited_ms:.1f}",
        f"size (MB): {row.bytes / 1e6:.1f}",
        f"throughput (GB/s): {row.gb_per_second:.2f}",
    ]
    return _line(parts)


def memory_line(*, iteration: int, peak_bytes: int, rank: int, device: str) -> str:
    """The largest memory peak of all ranks since the previous log step, and whose it is.

    `device` is "cuda" (allocated by torch) or "cpu" (resident since the process started).
    """
    what = {"cuda": "max allocated", "cpu": "max resident"}[device]
    parts = [
        f"memory at iteration {iteration}",
        f"{what} (MiB): {peak_bytes / 2**20:.1f}",
        f"on rank {rank}",
    ]
    return _line(parts)


def summary_line(
    *,
    iteration: int,
    consumed_samples: int,
    train_seconds: float,
    evaluation_seconds: float,
    save_seconds: float,
    skipped_iterations: int,
    waiting_seconds: float,
    reason: str,
) -> str:
    """The last line of a run: where it ended, why, and what its time went into.

    `skipped_iterations` counts the whole run, the seconds this start of it. `waiting_seconds`, for
    data, are a part of `train_seconds`.
    """
    parts = [
        f"training ended at iteration {iteration}",
        f"reason: {reason}",
        f"consumed samples: {consumed_samples:12d}",
        f"time training (s): {train_seconds:.1f}",
        f"evaluating (s): {evaluation_seconds:.1f}",
        f"saving (s): {save_seconds:.1f}",
        f"total number of skipped iterations: {skipped_iterations:3d}",
        f"waiting for data (s): {waiting_seconds:.1f}",
    ]
    return _line(parts)


def outcome_line(
    *,
    first_loss: float,
    last_loss: float,
    tokens_per_second: float,
    peak_bytes: int,
    loss_scale: float,
) -> str:
    """What this start of a run achieved: losses of its first and last log step, mean speed without
    saving and evaluating, memory of the rank that needed most."""
    parts = [
        f"lm loss first: {first_loss:.4f}",
        f"last: {last_loss:.4f}",
        f"tokens per second: {tokens_per_second:.1f}",
        f"peak memory (MiB): {peak_bytes / 2**20:.1f}",
        f"loss scale: {loss_scale:.1f}",
    ]
    return _line(parts)


def _line(parts: list[str]) -> str:
    return " " + " | ".join(parts) + " |"
