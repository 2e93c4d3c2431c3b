"""The console lines, character by character: scripts search for them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_lite.monitoring.console import (
    checkpoint_line,
    evaluation_line,
    memory_line,
    straggler_line,
    summary_line,
    train_line,
)
from megatron_lite.monitoring.metrics import CheckpointMetrics, EvaluationMetrics, StepMetrics


@pytest.fixture
def row() -> StepMetrics:
    return StepMetrics(
        iteration=10,
        consumed_samples=320,
        elapsed_ms_per_iteration=812.3,
        data_wait_ms_per_iteration=0.5,
        tokens_per_second=1234.5,
        tflops_per_gpu=1.2,
        mfu=None,
        learning_rate=6e-5,
        global_batch_size=32,
        lm_loss=10.42345,
        loss_scale=65536.0,
        grad_norm=1.234,
        skipped_iterations=0,
        nan_iterations=0,
    )


def test_train_line_is_the_promised_one(row: StepMetrics) -> None:
    assert train_line(row, train_iters=1000) == (
        " iteration       10/    1000 | consumed samples:          320 |"
        " elapsed time per iteration (ms): 812.3 | tokens per second: 1234.5 |"
        " throughput per GPU (TFLOP/s/GPU): 1.2 | learning rate: 6.000000E-05 |"
        " global batch size:    32 | lm loss: 1.042345E+01 | loss scale: 65536.0 |"
        " grad norm: 1.234 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )


def test_b30_skips_show_in_the_line(row: StepMetrics) -> None:
    skipped = replace(row, skipped_iterations=3, nan_iterations=1, lm_loss=math.nan)
    line = train_line(skipped, train_iters=1000)
    assert "| number of skipped iterations:   3 | number of nan iterations:   1 |" in line
    assert "| lm loss: NAN |" in line


def test_no_grad_norm_leaves_its_part_out(row: StepMetrics) -> None:
    line = train_line(replace(row, grad_norm=None), train_iters=1000)
    assert "grad norm" not in line
    assert "loss scale: 65536.0 | number of skipped" in line


def test_the_straggler_line_names_rank_ratio_and_share(row: StepMetrics) -> None:
    slow = replace(row, slowest_rank=5, slowest_rank_ratio=1.5, slowest_rank_share=0.807)
    assert straggler_line(slow) == (
        " slowest rank at iteration 10 | rank: 5 | its forward and backward took: 1.50 x the"
        " others' median | and of an iteration (%): 81 |"
    )


def test_b52_validation_and_test_lines_differ() -> None:
    valid = EvaluationMetrics(
        event="valid", iteration=20, consumed_samples=640, lm_loss=2.0, elapsed_ms=5.25
    )
    assert evaluation_line(valid) == (
        " validation loss at iteration 20 | consumed samples:          640 |"
        " lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | elapsed time (ms): 5.2 |"
    )
    assert evaluation_line(replace(valid, event="test")).startswith(" test loss at iteration 20 |")


def test_checkpoint_lines() -> None:
    row = CheckpointMetrics(
        event="save",
        iteration=20,
        consumed_samples=640,
        elapsed_ms=7.5,
        waited_ms=2.5,
        bytes=3_000_000,
        gb_per_second=0.4,
    )
    assert checkpoint_line(row) == (
        " saved checkpoint at iteration 20 | consumed samples:          640 |"
        " elapsed time (ms): 7.5 | training waited (ms): 2.5 | size (MB): 3.0 |"
        " throughput (GB/s): 0.40 |"
    )
    assert checkpoint_line(replace(row, event="load")).startswith(" loaded checkpoint at ")


def test_b55_memory_line_names_the_rank_with_the_peak() -> None:
    line = memory_line(iteration=5, peak_bytes=3 * 2**20, rank=2, device="cuda")
    assert line == " memory at iteration 5 | max allocated (MiB): 3.0 | on rank 2 |"
    assert "max resident (MiB)" in memory_line(iteration=5, peak_bytes=1, rank=0, device="cpu")


def test_summary_line() -> None:
    line = summary_line(
        iteration=20,
        consumed_samples=640,
        train_seconds=40.0,
        evaluation_seconds=4.0,
        save_seconds=8.0,
        skipped_iterations=2,
        waiting_seconds=1.25,
        reason="all iterations done",
    )
    assert line == (
        " training ended at iteration 20 | reason: all iterations done |"
        " consumed samples:          640 | time training (s): 40.0 | evaluating (s): 4.0 |"
        " saving (s): 8.0 | total number of skipped iterations:   2 |"
        " waiting for data (s): 1.2 |"
    )
