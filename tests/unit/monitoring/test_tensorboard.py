"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lite.monitoring.metrics import EvaluationMetrics, StepMetrics
from megatron_lite.monitoring.scalars import (
    Position,
    StageTimes,
    at,
    of_evaluation,
    of_stages,
    of_step,
)
from megatron_lite.monitoring.tensorboard import TensorBoardWriter

ROW = StepMetrics(
    iteration=1,
    consumed_samples=4,
    elapsed_ms_per_iteration=500.0,
    data_wait_ms_per_iteration=250.0,
    tokens_per_second=64.0,
    tflops_per_gpu=0.25,
    mfu=0.5,
    learning_rate=0.125,
    global_batch_size=4,
    lm_loss=3.0,
    loss_scale=1024.0,
    grad_norm=1.5,
    skipped_iterations=1,
    nan_iterations=2,
    slowest_rank=3,
    slowest_rank_share=0.75,
    slowest_rank_ratio=1.5,
)

BOTH_AXES = {
    "lm loss": 3.0,
    "learning-rate": 0.125,
    "batch-size": 4.0,
    "loss-scale": 1024.0,
    "grad-norm": 1.5,
    "params-norm": 7.0,
    "num-zeros": 3.0,
    "world-size": 2.0,
}
BY_ITERATION = {
    "iteration-time": 0.5,
    "batch-generator-time": 0.25,
    "throughput": 0.25,
    "tokens-per-second": 64.0,
    "mfu": 0.5,
    "skipped-iterations": 1.0,
    "nan-iterations": 2.0,
    "mem-max-allocated-bytes": 2.0**20,
    "slowest-rank": 3.0,
    "slowest-rank-share": 0.75,
    "slowest-rank-ratio": 1.5,
}


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def train(writer: TensorBoardWriter, iteration: int, lm_loss: float = 3.0) -> None:
    """Logs an iteration of a run with 4 samples a step."""
    row = replace(ROW, iteration=iteration, consumed_samples=4 * iteration, lm_loss=lm_loss)
    writer.write(of_step(row, world_size=2, mem_max_allocated_bytes=2**20))


def evaluate(writer: TensorBoardWriter, event: str, iteration: int, lm_loss: float) -> None:
    row = EvaluationMetrics(
        event=event,  # type: ignore[arg-type]
        iteration=iteration,
        consumed_samples=4 * iteration,
        lm_loss=lm_loss,
        elapsed_ms=1.0,
    )
    writer.write(of_evaluation(row))


def test_a_train_row_has_exactly_the_promised_tags(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, start=Position(0, 0))
    writer.write(
        of_step(ROW, world_size=2, mem_max_allocated_bytes=2**20, params_norm=7.0, num_zeros=3)
    )
    writer.close()
    expected = {tag: [(1, value)] for tag, value in {**BOTH_AXES, **BY_ITERATION}.items()}
    expected |= {f"{tag} vs samples": [(4, value)] for tag, value in BOTH_AXES.items()}
    assert scalars(tmp_path) == expected


def test_what_is_unknown_has_no_point(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, start=Position(0, 0))
    row = replace(ROW, mfu=None, grad_norm=None, lm_loss=math.nan)
    writer.write(of_step(row, world_size=2, mem_max_allocated_bytes=2**20))
    writer.close()
    found = scalars(tmp_path)
    absent = {"mfu", "grad-norm", "grad-norm vs samples", "params-norm", "num-zeros"}
    assert not absent & found.keys()
    assert math.isnan(found["lm loss"][0][1])


def test_b52_test_results_have_their_own_tag(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, start=Position(0, 0))
    for iteration in range(1, 21):
        train(writer, iteration)
        if iteration % 5 == 0:
            evaluate(writer, "valid", iteration, lm_loss=iteration / 4)
    evaluate(writer, "test", 20, lm_loss=30.0)
    writer.close()
    found = scalars(tmp_path)
    assert found["lm loss validation"] == [(5, 1.25), (10, 2.5), (15, 3.75), (20, 5.0)]
    assert [step for step, _ in found["lm loss validation vs samples"]] == [20, 40, 60, 80]
    assert found["lm loss test"] == [(20, 30.0)]
    for (_, loss), (_, ppl) in zip(
        found["lm loss validation"], found["lm loss validation ppl"], strict=True
    ):
        assert ppl == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["lm loss test ppl"][0][1] == pytest.approx(math.exp(20.0), rel=1e-6)
    assert all(
        [step for step, _ in points] == sorted({step for step, _ in points})
        for points in found.values()
    )


def test_b52_a_step_back_within_a_tag_is_refused(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, start=Position(0, 0))
    evaluate(writer, "valid", 5, lm_loss=1.0)
    with pytest.raises(ValueError, match="'lm loss validation': step 0 comes after step 5"):
        evaluate(writer, "valid", 0, lm_loss=1.0)
    writer.close()


def test_rows_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, start=Position(0, 0))
    train(writer, 1)
    assert scalars(tmp_path)["lm loss"] == [(1, 3.0)]
    writer.close()


@pytest.fixture
def started_at_second(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Names each new event file by a later second, as real restarts do."""
    real, starts = time.time, iter(range(1, 100))

    def start() -> None:
        shift = next(starts)
        monkeypatch.setattr(time, "time", lambda: real() + shift)

    return start


def test_resuming_where_the_run_ended_keeps_all_points(
    tmp_path: Path, started_at_second: Callable[[], None]
) -> None:
    for first in (1, 4):
        started_at_second()
        done = first - 1
        writer = TensorBoardWriter(tmp_path, start=Position(done, 4 * done))
        for iteration in range(first, first + 3):
            train(writer, iteration, lm_loss=float(first))
        writer.close()
    found = scalars(tmp_path)
    assert found["lm loss"] == [(1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 4)]
    assert [step for step, _ in found["lm loss vs samples"]] == [4, 8, 12, 16, 20, 24]


def test_b52_resuming_from_an_older_checkpoint_replaces_what_came_after_it(
    tmp_path: Path, started_at_second: Callable[[], None]
) -> None:
    """Saved at 3, killed at 6, then again from 3 and from 2: both axes show every step once."""
    for first, last in ((1, 6), (4, 8), (3, 8)):
        started_at_second()
        done = first - 1
        writer = TensorBoardWriter(tmp_path, start=Position(done, 4 * done))
        for iteration in range(first, last + 1):
            train(writer, iteration, lm_loss=float(first))
        writer.close()
    losses = [1, 1, 3, 3, 3, 3, 3, 3]
    found = scalars(tmp_path)
    assert found["lm loss"] == [(i + 1, loss) for i, loss in enumerate(losses)]
    assert found["lm loss vs samples"] == [(4 * (i + 1), loss) for i, loss in enumerate(losses)]


def test_starting_again_from_nothing_replaces_everything(
    tmp_path: Path, started_at_second: Callable[[], None]
) -> None:
    for loss in (1.0, 2.0):
        started_at_second()
        writer = TensorBoardWriter(tmp_path, start=Position(0, 0))
        train(writer, 1, lm_loss=loss)
        writer.close()
    found = scalars(tmp_path)
    assert found["lm loss"] == [(1, 2.0)]
    assert found["lm loss vs samples"] == [(4, 2.0)]


def test_each_stage_has_its_times_in_one_chart_a_kind(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, start=Position(0, 0))
    times = {1: StageTimes(0.25, 0.5, 0.125), 0: StageTimes(1.0, 2.0, 0.0)}
    writer.write(at(3, of_stages(times)))
    writer.close()
    assert scalars(tmp_path) == {
        "forward-time/stage 0": [(3, 1.0)],
        "forward-time/stage 1": [(3, 0.25)],
        "backward-time/stage 0": [(3, 2.0)],
        "backward-time/stage 1": [(3, 0.5)],
        "idle-time/stage 0": [(3, 0.0)],
        "idle-time/stage 1": [(3, 0.125)],
    }


def test_texts_stand_at_the_iteration_where_a_start_begins(
    tmp_path: Path, started_at_second: Callable[[], None]
) -> None:
    for done in (0, 3):
        started_at_second()
        writer = TensorBoardWriter(tmp_path, start=Position(done, 4 * done))
        writer.texts({"config": f"from {done}"})
        writer.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    events = reader.Tensors("config/text_summary")
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events]
    assert texts == [(0, "from 0"), (3, "from 3")]


def test_a_missing_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"set logging\.tensorboard_dir to null"):
        TensorBoardWriter(tmp_path, start=Position(0, 0))
