"""A job's life on a real Slurm: started, asked to leave, killed, queued again, and done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.small import layout, rows, small_config
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
LIMIT = 180.0
"""Seconds for whatever a test waits for; a loaded machine starts four ranks in half a minute."""
STEPS = 20
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps that are saved now and then, and go on from there."""
    checkpoint = {"save": "checkpoints", "load": "checkpoints", "save_interval": 8}
    return small_config(
        tmp_path_factory.mktemp("life") / "run.json",
        corpus,
        training={"train_iters": STEPS},
        checkpoint=checkpoint | {"exit_on_missing_checkpoint": False},
        launch={"requeue": True},
    )


@pytest.fixture(scope="module")
def unbroken(slurm: Cluster, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a job that nothing happens to: two nodes, tensor 2 x data 2."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    job = submit(slurm, config, run_dir)
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(run_dir)
    return run_dir


def submit(
    slurm: Cluster,
    config: Path,
    run_dir: Path,
    *overrides: str,
    phase: str = "",
    seconds: float = 0.0,
    options: Sequence[str] = (),
) -> str:
    """Queue launch/train.sbatch on both nodes with two ranks each; returns the job's id.

    In the phase it lingers, each time for some seconds; run_dir/mark tells that it has begun.
    """
    sets = [word for value in [*layout(2, 1), *overrides] for word in ("--set", value)]
    env = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if phase:
        env["PYTHON"] = str(run_dir / "python")
        env |= {"PHASE": phase, "SECONDS": str(seconds), "MARK": str(run_dir / "mark")}
        lingering = f'exec {sys.executable} -c "import tests.slurm.slow as s; s.main()" "$@"'
        (run_dir / "python").write_text(f"#!/bin/bash\n{lingering}\n")
        (run_dir / "python").chmod(0o755)
    return slurm.run(
        *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", *options),
        *(f"--output={run_dir}/out", f"--chdir={ROOT}", ROOT / "launch/train.sbatch"),
        *(config, "--run-dir", run_dir, *sets),
        env=env,
    )


def output(run_dir: Path) -> str:
    return (run_dir / "out").read_text() if (run_dir / "out").exists() else "no output"


def status(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "status.json").read_text())


def wait_for_step(slurm: Cluster, job: str, run_dir: Path, number: int) -> None:
    """Until step `number` is logged."""
    deadline = time.monotonic() + LIMIT
    while last_step(run_dir) < number:
        assert time.monotonic() < deadline and slurm.state(job) != "FAILED", output(run_dir)
        time.sleep(0.1)


def last_step(run_dir: Path) -> int:
    """The step that was logged last; 0 before the first."""
    there = rows(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    return int(there[-1]["iteration"]) if there else 0


def assert_same_losses(run_dir: Path, unbroken: Path) -> None:
    """Every step's, whichever start it belonged to; of repeated ones all are compared."""
    expected = {row["iteration"]: row["lm_loss"] for row in rows(unbroken)}
    found = [(row["iteration"], row["lm_loss"]) for row in rows(run_dir)]
    assert {step for step, _ in found} == set(expected) == set(range(1, STEPS + 1))
    assert all(loss == expected[step] for step, loss in found)


def test_two_nodes_train_to_the_end(unbroken: Path) -> None:
    assert status(unbroken) == {"state": "done", "iteration": STEPS}
    text = output(unbroken)
    assert text.count(f" iteration       {STEPS}/") == 1, "one rank speaks"
    assert "start 1 of job" in text and "Traceback" not in text


def test_asked_to_leave_it_is_queued_again_and_goes_on(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    job = submit(slurm, config, tmp_path, phase="training", seconds=0.5)
    wait_for_step(slurm, job, tmp_path, 3)
    slurm.run("scancel", "--signal=USR1", job)
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    text = output(tmp_path)
    assert "SIGUSR1 | queued again" in text and "start 2 of job" in text
    starts = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert starts[0]["step"] == 0 and 3 <= starts[1]["step"] < 8, "saved where it was asked to"
    assert_same_losses(tmp_path, unbroken)


def test_a_killed_step_is_queued_again_and_goes_on(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    job = submit(slurm, config, tmp_path, phase="training", seconds=0.2)
    wait_for_step(slurm, job, tmp_path, 10)
    slurm.run("scancel", "--signal=KILL", f"{job}.0")
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    assert "killed (srun gave" in output(tmp_path) and "start 2 of job" in output(tmp_path)
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
@pytest.mark.parametrize(
    ("phase", "delay"),
    [
        *(("start-up", seconds) for seconds in (0.0, 0.7, 2.0, 5.0)),
        *(("training", seconds) for seconds in (0.0, 0.6)),
        *(("evaluation", seconds) for seconds in (0.0, 1.5)),
        *(("save", seconds) for seconds in (0.0, 1.5)),
    ],
)
def test_the_signal_is_heeded_in_every_phase(
    phase: str, delay: float, slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    """Ten of ten: the run leaves with what it has saved, and comes to the same end."""
    evaluations = ["training.eval_interval=6", "training.eval_iters=2"]
    job = submit(slurm, config, tmp_path, *evaluations, phase=phase, seconds=2.0)
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / ("restarts.jsonl" if phase == "start-up" else "mark")).exists():
        assert time.monotonic() < deadline, output(tmp_path)
        time.sleep(0.05)
    if phase == "start-up":
        slurm.wait_for_step(job, LIMIT)
    time.sleep(delay)
    slurm.run("scancel", "--signal=USR1", job)
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    assert "SIGUSR1 | queued again" in output(tmp_path)
    assert_same_losses(tmp_path, unbroken)
    assert {row["iteration"] for row in rows(tmp_path, "valid")} == {6, 12, 18}


@pytest.mark.every
def test_a_time_limit_is_met(slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path) -> None:
    """Slurm's own signal, 30 s before the limit of a minute."""
    options = ["--time=1", "--signal=USR1@30"]
    job = submit(slurm, config, tmp_path, phase="training", seconds=4.0, options=options)
    assert slurm.wait(job, ENDED, 2 * LIMIT) == "COMPLETED", output(tmp_path)
    assert "SIGUSR1 | queued again" in output(tmp_path)
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
def test_a_node_that_goes_down(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    job = submit(slurm, config, tmp_path, phase="training", seconds=0.5)
    wait_for_step(slurm, job, tmp_path, 10)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.wait(job, ["PENDING"], LIMIT)
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    assert_same_losses(tmp_path, unbroken)
