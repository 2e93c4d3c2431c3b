"""metrics.jsonl: the promised keys, floats bit for bit, and JSON that any parser accepts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.monitoring.metrics import (
    CheckpointMetrics,
    EvaluationMetrics,
    MetricsWriter,
    StepMetrics,
    perplexity,
    to_json,
)


def step_metrics(**changes: Any) -> StepMetrics:
    facts: dict[str, Any] = {
        "iteration": 10,
        "consumed_samples": 320,
        "elapsed_ms_per_iteration": 812.3,
        "data_wait_ms_per_iteration": 0.5,
        "tokens_per_second": 1234.5,
        "tflops_per_gpu": 1.2,
        "mfu": None,
        "learning_rate": 6e-5,
        "global_batch_size": 32,
        "lm_loss": 10.42345,
        "loss_scale": 65536.0,
        "grad_norm": 1.234,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "source_samples": {"code": 96, "prose": 224},
    }
    return StepMetrics(**{**facts, **changes})


def strict_loads(line: str) -> dict[str, Any]:
    """Parses standard JSON only: Python's own extension for NaN and Infinity is an error."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    parsed: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return parsed


def test_train_rows_have_exactly_the_promised_keys() -> None:
    row = strict_loads(to_json(step_metrics()))
    assert list(row) == [
        "event",
        "iteration",
        "consumed_samples",
        "elapsed_ms_per_iteration",
        "data_wait_ms_per_iteration",
        "tokens_per_second",
        "tflops_per_gpu",
        "mfu",
        "learning_rate",
        "global_batch_size",
        "lm_loss",
        "loss_scale",
        "grad_norm",
        "skipped_iterations",
        "nan_iterations",
        "source_samples",
        "slowest_rank",
        "slowest_rank_share",
        "slowest_rank_ratio",
        "bubble",
        "simulated_bubble",
        "stage_forward_ms",
        "stage_backward_ms",
        "stage_idle_ms",
    ]
    assert row["source_samples"] == {"code": 96, "prose": 224}
    assert row["event"] == "train"
    assert row["mfu"] is None


@settings(max_examples=60, deadline=None)
@given(loss=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(loss: float) -> None:
    line = to_json(step_metrics(lm_loss=loss))
    assert f'"lm_loss": {loss!r}' in line
    assert strict_loads(line)["lm_loss"] == loss


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")],
)
def test_what_json_cannot_say_is_a_string_that_float_reads(value: float, text: str) -> None:
    row = strict_loads(to_json(step_metrics(grad_norm=value, lm_loss=value)))
    assert row["grad_norm"] == row["lm_loss"] == text
    assert repr(float(row["grad_norm"])) == repr(value)


def test_other_events_carry_their_own_facts() -> None:
    valid = EvaluationMetrics(
        event="valid", iteration=20, consumed_samples=640, lm_loss=3.5, elapsed_ms=12.0
    )
    save = CheckpointMetrics(
        event="save",
        iteration=20,
        consumed_samples=640,
        elapsed_ms=7.5,
        waited_ms=2.5,
        bytes=3_000_000,
        gb_per_second=0.4,
    )
    assert strict_loads(to_json(valid)) == {
        "event": "valid",
        "iteration": 20,
        "consumed_samples": 640,
        "lm_loss": 3.5,
        "elapsed_ms": 12.0,
    }
    assert strict_loads(to_json(save)) == {
        "event": "save",
        "iteration": 20,
        "consumed_samples": 640,
        "elapsed_ms": 7.5,
        "waited_ms": 2.5,
        "bytes": 3_000_000,
        "gb_per_second": 0.4,
    }


def test_every_row_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, last_iteration=0) as writer:
        for iteration in (1, 2):
            writer.write(step_metrics(iteration=iteration))
            rows = [strict_loads(line) for line in path.read_text().splitlines()]
            assert [row["iteration"] for row in rows] == list(range(1, iteration + 1))


def iterations(path: Path) -> list[int]:
    return [strict_loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_a_resumed_run_appends_and_sets_a_torn_last_line_aside(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "metrics.superseded.jsonl"
    with MetricsWriter(path, last_iteration=0) as writer:
        writer.write(step_metrics(iteration=1))
    with MetricsWriter(path, last_iteration=1) as writer:
        assert writer.superseded == 0 and not other.exists()
    path.write_text(path.read_text() + '{"event": "tr')
    with MetricsWriter(path, last_iteration=1) as writer:
        writer.write(step_metrics(iteration=2))
    assert iterations(path) == [1, 2]
    assert other.read_text().splitlines()[1:] == ['{"event": "tr']


def test_b52_rows_that_run_again_move_to_a_second_file(tmp_path: Path) -> None:
    """A plot of metrics.jsonl shows no loop, and nothing is lost."""
    path, other = tmp_path / "metrics.jsonl", tmp_path / "metrics.superseded.jsonl"
    written = []
    for first, last in ((1, 6), (4, 5), (3, 8)):
        with MetricsWriter(path, last_iteration=first - 1) as writer:
            for iteration in range(first, last + 1):
                row = step_metrics(iteration=iteration, lm_loss=float(first))
                writer.write(row)
                written.append(to_json(row))
    assert iterations(path) == list(range(1, 9))
    moved = other.read_text().splitlines()
    assert [strict_loads(line)["iteration"] for line in moved] == [3, 4, 5, 6, 2, 3, 4, 5]
    marks = [line for line in moved if strict_loads(line)["event"] == "superseded"]
    assert len(marks) == 2
    kept = path.read_text().splitlines()
    assert sorted([*kept, *moved]) == sorted([*written, *marks])


def test_a_kill_while_rows_are_moved_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "metrics.superseded.jsonl"
    path.write_text("".join(to_json(step_metrics(iteration=i)) + "\n" for i in (1, 2, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, target: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            MetricsWriter(path, last_iteration=1)
    assert iterations(path) == [1, 2, 3], "as it was"
    MetricsWriter(path, last_iteration=1).close()
    assert iterations(path) == [1]
    assert set(iterations(other)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.0, 1.0), (2.0, math.exp(2.0)), (25.0, math.exp(20.0)), (math.inf, math.exp(20.0))],
)
def test_perplexity_is_the_exponential_with_a_cap(loss: float, expected: float) -> None:
    assert perplexity(loss) == expected


def test_perplexity_of_nan_is_nan() -> None:
    assert math.isnan(perplexity(math.nan))
