"""The rows of a run's metrics.jsonl and their writer: one JSON object a line.

Holds finished numbers; it neither averages nor reduces over ranks. Made by the trainer, on the one
process that reports, and read again by console.py and scalars.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from megatron_lite.monitoring.superseded import set_aside_rows

PPL_LOSS_CAP = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One log step of training.

    `elapsed_ms_per_iteration` is the mean over the iterations since the previous row, in ms,
    without saving and evaluating; `data_wait_ms_per_iteration` is what of it the rank that waited
    longest waited for data. `tokens_per_second` is that of the whole job, `tflops_per_gpu` and
    `mfu` count model FLOPs (mfu from 0 to 1, None where the device's peak is unknown, as on a
    CPU). `lm_loss` is the mean over the unmasked tokens of the last global batch; NaN when that
    step had no finite loss. `loss_scale` is 1.0 without fp16. `grad_norm` is that before clipping,
    None where it was not computed. The last two count iterations since the previous row.
    `source_samples` counts for each source of the training data the samples that it has given.
    `slowest_rank` is the one whose own forward and backward work (stragglers.py) took most time:
    `slowest_rank_share` of the time since the previous row (from 0 to 1), and `slowest_rank_ratio`
    times what the median of the other ranks took. With a pipeline, `bubble` is idle time / (ranks x
    time) of its forwards and backwards, `simulated_bubble` that of the schedule if all actions of a
    kind took their mean, and the stages' own times an iteration are in ms.
    """

    iteration: int
    consumed_samples: int
    elapsed_ms_per_iteration: float
    data_wait_ms_per_iteration: float
    tokens_per_second: float
    tflops_per_gpu: float
    mfu: float | None
    learning_rate: float
    global_batch_size: int
    lm_loss: float
    loss_scale: float
    grad_norm: float | None
    skipped_iterations: int
    nan_iterations: int
    source_samples: dict[str, int] = field(default_factory=dict)
    slowest_rank: int = 0
    slowest_rank_share: float = 0.0
    slowest_rank_ratio: float = 1.0
    bubble: float | None = None
    simulated_bubble: float | None = None
    stage_forward_ms: list[float] = field(default_factory=list)
    stage_backward_ms: list[float] = field(default_factory=list)
    stage_idle_ms: list[float] = field(default_factory=list)
    event: Literal["train"] = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMetrics:
    """One evaluation: mean loss over the unmasked tokens of the part, and its time in ms."""

    event: Literal["valid", "test"]
    iteration: int
    consumed_samples: int
    lm_loss: float
    elapsed_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetrics:
    """One checkpoint written or read: how long it took, and training waited for it, in ms.

    The two differ where a thread writes while training goes on.
    """

    event: Literal["save", "load"]
    iteration: int
    consumed_samples: int
    elapsed_ms: float
    waited_ms: float
    bytes: int
    gb_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMetrics:
    """A step whose loss or gradients went wrong (`iteration`), and what was done about it.

    `samples` are [first, last) of the samples that it read; `file` says more, null: nothing does.
    """

    event: Literal["nonfinite", "spike"]
    iteration: int
    consumed_samples: int
    action: Literal["log", "skip", "rewind", "stop"]
    samples: tuple[int, int]
    story: str
    file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindMetrics:
    """The run went back from `from_iteration` to `iteration`, leaving out samples [first, last).

    The rows between are set aside, with what was told of the fault, so it is told again: `because`,
    and `file` as in FaultMetrics.
    """

    iteration: int
    consumed_samples: int
    from_iteration: int
    skip_samples: tuple[int, int]
    rewinds: int
    because: str
    file: str | None
    event: Literal["rewind"] = "rewind"


Row = StepMetrics | EvaluationMetrics | CheckpointMetrics | FaultMetrics | RewindMetrics


def perplexity(lm_loss: float) -> float:
    """exp(lm_loss), with the loss capped at 20 so that a diverged run stays plottable."""
    if math.isnan(lm_loss):
        return math.nan
    return math.exp(min(lm_loss, PPL_LOSS_CAP))


def to_json(row: Row) -> str:
    """The row as one line of standard JSON, `event` first.

    Floats are written with repr's digits, so equal text means equal bits. JSON has no NaN and no
    infinity: they become the strings "NaN", "Infinity" and "-Infinity", which Python's float() and
    JavaScript's Number() read as what they are. What does not apply is null.
    """
    facts = {key: _finite_or_name(value) for key, value in asdict(row).items()}
    return json.dumps({"event": facts.pop("event"), **facts}, allow_nan=False)


def _finite_or_name(value: object) -> object:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


class MetricsWriter:
    """Appends rows to a file and flushes each, so a killed run keeps all rows but a torn last one.

    A run that goes on from `last_iteration` appends to the same file. The rows of an earlier start
    beyond it, and the torn one, go to `metrics.superseded.jsonl` beside it, `superseded` of them.
    """

    def __init__(self, path: Path, *, last_iteration: int) -> None:
        self.other = path.with_suffix(f".superseded{path.suffix}")
        self.superseded = set_aside_rows(path, self.other, last_iteration=last_iteration)
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def holds(self, event: str, iteration: int) -> bool:
        """Whether a row tells of `event` at `iteration`."""
        with self._path.open(encoding="utf-8") as file:
            rows = (json.loads(line) for line in file)
            return any((row["event"], row["iteration"]) == (event, iteration) for row in rows)

    def write(self, row: Row) -> None:
        """Appends `row` as one line."""
        self._file.write(to_json(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; closing twice is allowed."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
