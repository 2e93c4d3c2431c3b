"""Which numbers of a run become which curves, under Megatron's tags. Pure.

x is the iteration; a tag that ends in " vs samples" has consumed samples instead. What writes the
curves (tensorboard.py, csv_files.py, wandb_run.py) takes these lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron_lite.monitoring.metrics import EvaluationMetrics, StepMetrics, perplexity

VS_SAMPLES = " vs samples"


class Scalar(NamedTuple):
    """A point of a curve, in the order in which DeepSpeed's monitors take it."""

    tag: str
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands on both axes; at the start of a run, the last step that counts."""

    iteration: int
    consumed_samples: int

    def last_valid(self, tag: str) -> int:
        """The x of this position on the tag's axis."""
        return self.consumed_samples if tag.endswith(VS_SAMPLES) else self.iteration


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that a pipeline stage spent in one step, by what it did."""

    forward: float
    backward: float
    idle: float


class ScalarWriter(Protocol):
    """Takes the curves of a run, on the one process that reports."""

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Append points and make them visible to readers."""

    def close(self) -> None:
        """Write what is pending; nothing is written afterwards."""


def of_step(
    row: StepMetrics,
    *,
    world_size: int,
    mem_max_allocated_bytes: int,
    params_norm: float | None = None,
    num_zeros: int | None = None,
) -> list[Scalar]:
    """The points of one log step; what is None has none. Memory is the maximum over ranks."""
    both_axes = {
        "lm loss": row.lm_loss,
        "learning-rate": row.learning_rate,
        "batch-size": row.global_batch_size,
        "loss-scale": row.loss_scale,
        "grad-norm": row.grad_norm,
        "params-norm": params_norm,
        "num-zeros": num_zeros,
        "world-size": world_size,
    }
    by_iteration = {
        "iteration-time": row.elapsed_ms_per_iteration / 1000,
        "batch-generator-time": row.data_wait_ms_per_iteration / 1000,  # Megatron's name for it
        "throughput": row.tflops_per_gpu,
        "tokens-per-second": row.tokens_per_second,
        "mfu": row.mfu,
        "skipped-iterations": row.skipped_iterations,
        "nan-iterations": row.nan_iterations,
        "mem-max-allocated-bytes": mem_max_allocated_bytes,
        "slowest-rank": row.slowest_rank,
        "slowest-rank-share": row.slowest_rank_share,
        "slowest-rank-ratio": row.slowest_rank_ratio,
        "pipeline-bubble": row.bubble,
        "pipeline-bubble-simulated": row.simulated_bubble,
    }
    return [*_on_both_axes(both_axes, row), *at(row.iteration, by_iteration)]


def of_evaluation(row: EvaluationMetrics) -> list[Scalar]:
    """The points of one validation or test, each under its own tags, with capped perplexity."""
    tag = {"valid": "lm loss validation", "test": "lm loss test"}[row.event]
    return _on_both_axes({tag: row.lm_loss, f"{tag} ppl": perplexity(row.lm_loss)}, row)


def of_stages(times: Mapping[int, StageTimes]) -> dict[str, float]:
    """Tags and seconds of each stage's forward, backward and idle time, one chart for each kind."""
    return {
        f"{kind}-time/stage {stage}": getattr(spent, kind)
        for kind in ("forward", "backward", "idle")
        for stage, spent in sorted(times.items())
    }


def at(iteration: int, values: Mapping[str, float | None]) -> list[Scalar]:
    """A point of each tag that has a value."""
    return [Scalar(tag, value, iteration) for tag, value in values.items() if value is not None]


def _on_both_axes(
    values: Mapping[str, float | None], row: StepMetrics | EvaluationMetrics
) -> list[Scalar]:
    samples = {f"{tag}{VS_SAMPLES}": value for tag, value in values.items()}
    return [*at(row.iteration, values), *at(row.consumed_samples, samples)]
