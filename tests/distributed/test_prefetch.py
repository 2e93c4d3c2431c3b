"""A step does not wait for data that workers can read in time, and the run says how long it did."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import train
from tests.distributed.small import layout, rows, scalars, small_config

SAMPLE, STEP, BATCH, STEPS = 0.01, 0.1, 6, 8
"""A sample takes 10 ms to read, so a step's six 60 ms; a step takes 100 ms besides."""


def slow_training(config: Path, overrides: list[str], run_dir: Path) -> list[str]:
    """Train from a slow source with slow steps; returns what was printed."""
    read, said = GPTDataset.__getitem__, list[str]()

    def slow_read(self: GPTDataset, sample: int) -> np.ndarray:
        time.sleep(SAMPLE)
        return read(self, sample)

    def slow_steps(trainer: Trainer) -> None:
        step = trainer.engine.step
        trainer.report._echo = said.append

        def slow_step(lr: float) -> object:
            time.sleep(STEP)
            return step(lr)

        trainer.engine.step = slow_step  # type: ignore[method-assign,assignment]

    GPTDataset.__getitem__ = slow_read  # type: ignore[method-assign]
    train(config, overrides, run_dir, slow_steps)
    return said


def test_workers_take_the_waiting_away(corpus: Path, tmp_path: Path) -> None:
    """Two stages, as each reads for itself. The first steps wait for the workers to begin."""
    config = small_config(
        tmp_path / "run.json",
        corpus,
        training={"train_iters": STEPS, "global_batch_size": BATCH},
        logging={"tensorboard_dir": "board"},
    )
    waits = {}
    for workers in (0, 2):
        run_dir = tmp_path / str(workers)
        run_dir.mkdir()
        overrides = [*layout(1, 2), f"data.num_workers={workers}"]
        said = on_ranks(2, slow_training, config, overrides, run_dir)
        logged = [row["data_wait_ms_per_iteration"] for row in rows(run_dir)]
        board = scalars(run_dir / "board")["batch-generator-time"]
        assert [step for step, _ in board] == list(range(1, STEPS + 1))
        assert [1000 * seconds for _, seconds in board] == pytest.approx(logged, rel=1e-5)
        assert f"waiting for data (s): {sum(logged) / 1000:.1f} |" in said[0][-2]
        waits[workers] = median(logged[STEPS // 2 :])
    assert waits[0] > 1000 * SAMPLE * BATCH
    assert waits[2] < 0.1 * waits[0]
