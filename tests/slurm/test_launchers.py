"""A run under each launcher: the same losses to the bit, and the same end when a rank ends early.

Only what is about srun needs Slurm.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.processes import Job, arguments, deepspeed, started, torchrun
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import train
from tests.distributed.small import layout, rows
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import LIMIT, last_step, status

GONE = 30.0
"""Seconds within which nothing of a broken job may be left."""
FAULTY = "tests.distributed.faulty"


@contextmanager
def srun(
    slurm: Cluster, config: Path, run_dir: Path, *overrides: str, env: dict[str, str]
) -> Iterator[Job]:
    """Two nodes with two ranks each, without a batch script."""
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    command += [sys.executable, "-m", FAULTY, *arguments(config, run_dir, *overrides)]
    own = {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    with started(command, {**env, **own}) as job:
        yield job


FAULTS = {
    "kill": ("kill:2:4", "", "ended without a word"),
    "raise": ("raise:2:4", "1", "a planned fault"),
    "exit": ("exit:2:4", "", "ended without a word"),
}
"""A rank is killed, raises beside one that ignores SIGTERM, and leaves early with code 0."""

DEFAULT = {("torchrun", "raise"), ("deepspeed", "kill"), ("srun", "kill")}


@pytest.fixture(scope="module")
def expected(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of three steps of tensor 2 x data 2, without any launcher."""
    overrides = [*layout(2, 1), "training.train_iters=3"]
    return on_ranks(4, train, config, overrides, tmp_path_factory.mktemp("expected"))[0].losses


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        pytest.param(by, fault, marks=[] if (by, fault) in DEFAULT else pytest.mark.every)
        for by in ("torchrun", "deepspeed", "srun")
        for fault in FAULTS
    ],
)
def test_b51_equal_losses_and_then_a_rank_ends(
    launcher: str,
    fault: str,
    config: Path,
    expected: list[float],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Within 30 s of rank 2's end nobody is left."""
    what, deaf, told = FAULTS[fault]
    env = {"FAULT": what, "DEAF": deaf}
    if launcher == "srun":
        start = srun(request.getfixturevalue("slurm"), config, tmp_path, *layout(2, 1), env=env)
    else:
        by = {"torchrun": torchrun, "deepspeed": deepspeed}[launcher]
        start = by(4, config, tmp_path, *layout(2, 1), module=FAULTY, env=env)
    with start as job:
        code, _, err = job.finish(LIMIT)
        job.wait_until_empty(GONE)
    assert code != 0
    found = status(tmp_path)
    assert (found["state"], found["rank"]) == ("failed", 2), found
    assert told in str(found["error"]) and told in err
    assert "because of rank 2" in err or "rank 2 failed" in err
    assert [row["lm_loss"] for row in rows(tmp_path)] == expected


@pytest.mark.every
@pytest.mark.parametrize(
    ("signals", "state"),
    [([signal.SIGUSR1], "requeue"), ([signal.SIGINT, signal.SIGINT], "running")],
)
def test_signals_to_srun(
    signals: list[signal.Signals], state: str, slurm: Cluster, config: Path, tmp_path: Path
) -> None:
    """It passes SIGUSR1 on, and follows Ctrl-C, twice within a second, with SIGKILL for all."""
    endless = [*layout(2, 1), "training.train_iters=1000000"]
    with srun(slurm, config, tmp_path, *endless, env={}) as job:
        deadline = time.monotonic() + LIMIT
        while last_step(tmp_path) < 2:
            assert time.monotonic() < deadline and job.launcher.poll() is None
            time.sleep(0.1)
        for number in signals:
            job.launcher.send_signal(number)
            time.sleep(0.3)
        code, _, err = job.finish(LIMIT)
        job.wait_until_empty(GONE)
    found = status(tmp_path)
    assert code != 0 and found["state"] == state, err
    if state == "requeue":
        assert (tmp_path / f"checkpoints/global_step{found['iteration']}").is_dir()
