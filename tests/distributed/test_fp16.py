"""Non-finite gradients: one rank's fault skips everyone's step, and a run never fails silently.

DeepSpeed's loss scale doubles after `loss_scale_window` steps that follow a first clean one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.faults import FOREVER, Watched, train_poisoned
from tests.distributed.ranks import on_ranks
from tests.distributed.small import layout, rows, scalars, small_config

FP16 = {"dtype": "fp16", "hysteresis": 1}


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp16, six steps, TensorBoard."""
    return small_config(
        tmp_path_factory.mktemp("fp16") / "run.json",
        corpus,
        training={"train_iters": 6},
        precision=FP16,
        logging={"tensorboard_dir": "tensorboard"},
    )


def alike(runs: list[Watched]) -> Watched:
    """The first rank's view, after a check that all ranks saw the same."""
    first = runs[0]
    for run in runs[1:]:
        assert run.applied == first.applied
        assert run.scales == first.scales
        assert run.rates == first.rates
        assert run.moved == first.moved
        assert run.error == first.error
        assert (run.iterations, run.updates, run.consumed) == (
            first.iterations,
            first.updates,
            first.consumed,
        )
    return first


@pytest.mark.parametrize(
    ("world_size", "culprit", "sizes"),
    [
        pytest.param(4, 3, layout(2, 2, zero=1), id="tp2-pp2-zero1"),
        pytest.param(4, 1, layout(2, 2, zero=2, offload="cpu"), id="tp2-pp2-zero2-cpu"),
        pytest.param(4, 2, layout(1, 2, zero=2), id="pp2-dp2-zero2"),
        pytest.param(2, 1, layout(1, 1, zero=1, offload="cpu"), id="dp2-zero1-cpu"),
        pytest.param(4, 3, layout(2, 1, zero=3), id="tp2-dp2-zero3"),
    ],
)
def test_one_rank_overflows_and_all_skip(
    world_size: int, culprit: int, sizes: list[str], config: Path, tmp_path: Path
) -> None:
    runs = on_ranks(world_size, train_poisoned, config, sizes, tmp_path, (3,), (culprit,))
    run = alike(runs)
    assert run.applied == [True, True, False, True, True, True]
    assert run.moved == run.applied
    assert run.scales == [65536.0] * 2 + [32768.0] * 4
    assert run.norms[2] == float("inf") and max(run.norms[:2] + run.norms[3:]) < 100
    assert (run.iterations, run.updates, run.consumed) == (6, 5, 24)
    board = scalars(tmp_path / "tensorboard")
    assert board["loss-scale"] == [(i + 1, scale) for i, scale in enumerate(run.scales)]
    assert board["skipped-iterations"] == [(i + 1, float(i == 2)) for i in range(6)]
    logged = rows(tmp_path)
    assert [row["loss_scale"] for row in logged] == run.scales
    assert [row["skipped_iterations"] for row in logged] == [0, 0, 1, 0, 0, 0]
    assert logged[2]["grad_norm"] == "Infinity"


def test_b29_scale_falls_to_its_floor_and_the_run_stops(config: Path, tmp_path: Path) -> None:
    """65,536 to 1 in 16 skips, then as many more as the config allows, then a named end."""
    overrides = [*layout(1, 2), "training.train_iters=100", "logging.log_interval=50"]
    overrides += ["precision.max_consecutive_nonfinite_steps=4"]
    run = alike(on_ranks(2, train_poisoned, config, overrides, tmp_path, range(3, 200), (1,)))
    powers = [float(2**power) for power in range(15, -1, -1)]
    assert run.scales == [65536.0, 65536.0, *powers, *[1.0] * 4]
    assert run.applied == run.moved == [True] * 2 + [False] * 20
    for part in (
        "iteration 22",
        "rank 1 (stage 1): layers.1.mlp.down",
        "in 4 steps in a row",
        "loss scale 1,",
    ):
        assert part in run.error, run.error
    assert "rank 0" not in run.error


def test_b29_hysteresis_and_regrowth(config: Path, tmp_path: Path) -> None:
    patient = ["precision.hysteresis=2"]
    run = alike(on_ranks(2, train_poisoned, config, patient, tmp_path, (3, 4), (1,)))
    assert run.applied == [True, True, False, False, True, True]
    assert run.scales == [65536.0] * 3 + [32768.0] * 3

    growing = ["precision.loss_scale_window=2", "precision.initial_loss_scale=1024"]
    growing += ["training.train_iters=9"]
    run = alike(on_ranks(2, train_poisoned, config, growing, tmp_path, (2,), (1,)))
    assert run.applied.count(False) == 1
    assert run.scales == [1024.0] + [512.0] * 3 + [1024.0] * 2 + [2048.0] * 2 + [4096.0]


def test_b29_a_floor_above_one_and_the_last_step_tells(config: Path, tmp_path: Path) -> None:
    """Even where the first skip at the floor is the last, its cause is known; a step whose skip
    lowers the scale is not counted."""
    overrides = ["precision.initial_loss_scale=8", "precision.min_loss_scale=4"]
    overrides += ["precision.max_consecutive_nonfinite_steps=1"]
    (run,) = on_ranks(1, train_poisoned, config, overrides, tmp_path, FOREVER)
    assert run.scales == [4.0, 4.0]
    assert "layers.0.mlp.down" in run.error and "loss scale 4" in run.error


def test_b30_what_a_skipped_step_moves(config: Path, tmp_path: Path) -> None:
    """12 iterations with 4 skips: samples go on, the schedule stands at update 8."""
    overrides = ["optimizer.lr=0.001", "optimizer.lr_warmup_iters=10", "training.train_iters=12"]
    run = alike(on_ranks(2, train_poisoned, config, overrides, tmp_path, (1, 2, 3, 7), (0,)))
    skipped = [i in (1, 2, 3, 7) for i in range(1, 13)]
    assert run.applied == run.moved == [not skip for skip in skipped]
    assert (run.iterations, run.updates, run.consumed) == (12, 8, 48)
    done, expected_given, expected_logged = 0, [], []
    for skip in skipped:
        expected_given.append(0.001 * (done + 1) / 10)
        done += not skip
        expected_logged.append(0.001 * done / 10)
    assert run.rates == pytest.approx(expected_given, rel=1e-12)
    logged = rows(tmp_path)
    assert [row["learning_rate"] for row in logged] == pytest.approx(expected_logged, rel=1e-12)
    assert logged[-1]["learning_rate"] == pytest.approx(0.0008)
    assert [row["consumed_samples"] for row in logged] == [4 * i for i in range(1, 13)]
    assert [row["skipped_iterations"] for row in logged] == [int(skip) for skip in skipped]
    board = scalars(tmp_path / "tensorboard")
    assert [value for _, value in board["skipped-iterations"]] == [float(s) for s in skipped]
    assert sum(row["nan_iterations"] for row in logged) == 0


def test_b30_skips_between_two_log_steps_are_counted(config: Path, tmp_path: Path) -> None:
    overrides = ["logging.log_interval=3"]
    on_ranks(1, train_poisoned, config, overrides, tmp_path, (1, 2, 6))
    assert [row["skipped_iterations"] for row in rows(tmp_path)] == [2, 1]


@pytest.mark.parametrize(("dtype", "zero"), [("bf16", 2), ("fp32", 1), ("bf16", 3), ("fp32", 3)])
def test_b30_without_a_loss_scale_bad_gradients_end_the_run(
    dtype: str, zero: int, config: Path, tmp_path: Path
) -> None:
    overrides = [f'precision.dtype="{dtype}"', "precision.hysteresis=2", *layout(zero=zero)]
    overrides += ["precision.max_consecutive_nonfinite_steps=3", "training.train_iters=50"]
    run = alike(on_ranks(2, train_poisoned, config, overrides, tmp_path, FOREVER, (1,)))
    assert run.applied == run.moved == [False] * 3
    assert "rank 1 (stage 0): layers.0.mlp.down" in run.error
    assert "iteration 3" in run.error and "in 3 steps in a row" in run.error


def test_b30_a_fixed_loss_scale_gives_up_as_well(config: Path, tmp_path: Path) -> None:
    overrides = ["precision.loss_scale=128", "precision.hysteresis=2"]
    overrides += ["precision.max_consecutive_nonfinite_steps=2"]
    (run,) = on_ranks(1, train_poisoned, config, overrides, tmp_path, (1, 3, 4))
    assert run.applied == [False, True, False, False]
    assert run.scales == [128.0] * 4
    assert "iteration 4" in run.error and "loss scale 128" in run.error
