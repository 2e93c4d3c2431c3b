"""A job's life on a real Slurm: started, asked to leave, killed, queued again, and done."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.health.observation import observe
from tests.distributed.small import rows
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    ENDED,
    LIMIT,
    STEPS,
    assert_same_losses,
    interpreter,
    output,
    status,
    submit,
    wait_for_step,
)


def test_two_nodes_train_to_the_end(unbroken: Path) -> None:
    assert status(unbroken) == {"state": "done", "iteration": STEPS}
    text = output(unbroken)
    assert text.count(f" iteration       {STEPS}/") == 1, "one rank speaks"
    assert "start 1 of job" in text and "Traceback" not in text
    assert "preflight | 4 ranks on 2 nodes: n1, n2 |" in text and "clocks within" in text
    seen = observe(unbroken, sleep=lambda seconds: None)
    assert [one.record.facts.machine for one in seen.ranks.values()] == ["n1", "n1", "n2", "n2"]


def test_asked_to_leave_it_is_queued_again_and_goes_on(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    """As launch.requeue says. The notice goes to the script alone, as with --signal=B:USR1, which
    passes it on."""
    job = submit(slurm, config, tmp_path, phase="training", seconds=0.3)
    wait_for_step(slurm, job, tmp_path, 3)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    text = output(tmp_path)
    assert "SIGUSR1 | queued again" in text and "start 2 of job" in text
    starts = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert starts[0]["step"] == 0 and 3 <= starts[1]["step"] < 8, "saved where it was asked to"
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
def test_a_killed_step_is_queued_again_and_goes_on(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    job = submit(slurm, config, tmp_path, phase="training", seconds=0.3)
    wait_for_step(slurm, job, tmp_path, 11)
    slurm.run("scancel", "--signal=KILL", f"{job}.0")
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    assert "killed (srun gave" in output(tmp_path) and "start 2 of job" in output(tmp_path)
    assert "saved so far: step 8" in output(tmp_path), "the newest that is whole"
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
@pytest.mark.parametrize("phase", ["start-up", "training"])
def test_a_job_that_has_to_make_room_for_another_is_queued_again(
    phase: str, slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    """Slurm asks the ranks to end, a minute before it ends them itself."""
    job = submit(slurm, config, tmp_path, phase="training", seconds=0.3)
    if phase == "training":
        wait_for_step(slurm, job, tmp_path, 3)
    slurm.wait_for_step(job, LIMIT)
    where = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    other = slurm.run("sbatch", "--parsable", *where, "--wrap=true")
    assert slurm.wait(other, ENDED, LIMIT) == "COMPLETED"
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    assert "SIGTERM | queued again" in output(tmp_path) or "killed (srun gave 143)" in output(
        tmp_path
    )
    assert (saved_steps(tmp_path)[1] >= 3) is (phase == "training")
    assert_same_losses(tmp_path, unbroken)


def deaf_python(run_dir: Path) -> str:
    """An interpreter whose training hears no signal in the first start, and is done in another."""
    return interpreter(
        run_dir,
        f'[ "$2" = megatron_lite.train ] || exec {sys.executable} "$@"',
        f"cd {run_dir}",
        'if [ -e started ]; then echo \'{"state": "done"}\' >status.json; exit 0; fi',
        'echo \'{"state": "running"}\' >status.json; touch started; sleep 300',
    )


def test_a_cancelled_job_stays_cancelled(slurm: Cluster, config: Path, tmp_path: Path) -> None:
    options = ["--nodes=1", "--ntasks-per-node=1"]
    job = submit(slurm, config, tmp_path, options=options, python=deaf_python(tmp_path))
    slurm.wait_for_step(job, LIMIT)
    slurm.run("scancel", job)
    assert slurm.wait(job, ENDED, LIMIT) == "CANCELLED"
    assert "queued again" not in output(tmp_path)


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
    assert_saved_and_queued_again(tmp_path, "SIGUSR1")
    assert_same_losses(tmp_path, unbroken)
    assert {row["iteration"] for row in rows(tmp_path, "valid")} == {6, 12, 18}


def assert_saved_and_queued_again(run_dir: Path, why: str) -> None:
    """The second start goes on from where the first one left."""
    left = re.search(rf"left at iteration (\d+): {why} \| queued again", output(run_dir))
    assert left is not None, output(run_dir)
    assert saved_steps(run_dir)[:2] == [0, int(left[1])]


def saved_steps(run_dir: Path) -> list[int]:
    """The newest checkpoint at the beginning of each start."""
    return [
        json.loads(line)["step"] for line in (run_dir / "restarts.jsonl").read_text().splitlines()
    ]


@pytest.mark.every
def test_a_time_limit_is_met(slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path) -> None:
    """Slurm's own signal, 12 s before the limit of a minute, or up to half a minute earlier, since
    Slurm looks at times twice a minute. A start that takes as long as that meets no limit."""
    options = ["--time=1", "--signal=USR1@12"]
    job = submit(slurm, config, tmp_path, phase="training", seconds=2.0, options=options)
    assert slurm.wait(job, ENDED, 2 * LIMIT) == "COMPLETED", output(tmp_path)
    assert_saved_and_queued_again(tmp_path, "SIGUSR1")
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
def test_a_run_leaves_before_its_limit_where_no_signal_comes(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    """The batch script tells it when its time ends, and the first save how much it needs."""
    options = ["--time=1", "--signal=CONT@1"]
    often = "checkpoint.save_interval=2"
    job = submit(slurm, config, tmp_path, often, phase="training", seconds=2.0, options=options)
    assert slurm.wait(job, ENDED, 2 * LIMIT) == "COMPLETED", output(tmp_path)
    assert_saved_and_queued_again(tmp_path, "the job's time is nearly over")
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
def test_a_run_whose_limit_was_extended_stays(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    options = ["--time=1", "--signal=CONT@1"]
    often = "checkpoint.save_interval=2"
    job = submit(slurm, config, tmp_path, often, phase="training", seconds=3.0, options=options)
    slurm.wait_for_step(job, LIMIT)  # which knows the first limit
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    assert slurm.wait(job, ENDED, 2 * LIMIT) == "COMPLETED", output(tmp_path)
    told = slurm.run("scontrol", "show", "job", job)
    assert re.search(r"RunTime=00:(0[1-9]|1)", told), "longer than the first limit"
    assert saved_steps(tmp_path) == [0], "it was started once"
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
def test_a_time_limit_that_comes_too_early(slurm: Cluster, config: Path, tmp_path: Path) -> None:
    """The first start hears no signal, as one that still saves or loads does not in time."""
    options = ["--time=1", "--nodes=1", "--ntasks-per-node=1"]
    job = submit(slurm, config, tmp_path, options=options, python=deaf_python(tmp_path))
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    assert "the time limit came before the run had left | queued again" in output(tmp_path)
    assert "start 2 of job" in output(tmp_path)


@pytest.mark.every
def test_a_node_that_goes_down(
    slurm: Cluster, config: Path, unbroken: Path, tmp_path: Path
) -> None:
    job = submit(slurm, config, tmp_path, phase="training", seconds=0.5)
    wait_for_step(slurm, job, tmp_path, 10)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.wait(job, ["PENDING"], LIMIT)
    with contextlib.suppress(AssertionError):  # it may be back already (ReturnToService)
        slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(tmp_path)
    # The newest that is whole; Slurm asks the ranks to end, which may have saved one more.
    assert saved_steps(tmp_path)[1] >= 8
    assert_same_losses(tmp_path, unbroken)


@pytest.mark.every
def test_a_job_that_gets_nowhere_is_not_started_for_ever(
    slurm: Cluster, config: Path, tmp_path: Path
) -> None:
    """Its training is killed each time before it has saved anything."""
    python = interpreter(
        tmp_path,
        f'[ "$2" = megatron_lite.train ] || exec {sys.executable} "$@"',
        f"cd {tmp_path}",
        'echo \'{"state": "running"}\' >status.json; kill -KILL $$',
    )
    options = ["--nodes=1", "--ntasks-per-node=1"]
    job = submit(slurm, config, tmp_path, options=options, python=python)
    assert slurm.wait(job, ENDED, LIMIT) == "FAILED", output(tmp_path)
    assert saved_steps(tmp_path) == [0, 0, 0]
    assert "2 restarts in a row brought no new checkpoint" in output(tmp_path)
    assert status(tmp_path)["state"] == "failed"
