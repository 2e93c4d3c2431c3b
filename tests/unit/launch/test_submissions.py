"""Which jobs of a run folder are not over, whether a new one waits for them, and who may submit."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.submissions import (
    Job,
    QueueError,
    alone,
    demand_an_end,
    next_folder,
    note,
    unfinished,
)


def squeue(folder: Path, *lines: str) -> dict[str, str]:
    """An environment with a squeue of these lines."""
    program = folder / "squeue"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SQUEUE_STATES": "RUNNING"}


def submitted(run_dir: Path, *jobs: str) -> None:
    """A submission each."""
    for job in jobs:
        folder = next_folder(run_dir)
        folder.mkdir(parents=True)
        note(folder, Job.of(job))


def test_the_queue_is_asked_for_what_was_noted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    env = squeue(tmp_path, "echo it is down >&2; exit 1")
    assert unfinished(run_dir, env) == [], "it is not asked for nothing"
    submitted(run_dir, "9", "10", "11")
    assert sorted(path.name for path in run_dir.glob("*/*")) == ["1", "2", "3"]
    with pytest.raises(QueueError, match=f"jobs of {run_dir} are over: it is down"):
        unfinished(run_dir, env)
    env = squeue(tmp_path, '[ -n "$SQUEUE_STATES" ] || printf "10 a\\n9 b\\n110 c\\n"')
    assert unfinished(run_dir, env) == [Job(9), Job(10)]


def test_a_job_that_sbatch_did_not_hear_of_is_known_by_its_script(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    (run_dir / "submissions/1").mkdir(parents=True)
    here, there = (
        f"{tmp_path}/{name}/submissions/1/train.sbatch" for name in ("a run", "a runner")
    )
    env = squeue(
        tmp_path, f'echo "7 {here} x --run-dir y"', f'echo "8 {there}"', "printf '9 \\377\\n'"
    )
    assert unfinished(run_dir, env) == [Job(7)]


CLUSTERS = (
    """case "$*" in""",
    """--clusters=east*) printf "CLUSTER: east\\n9 a\\n8 b\\n";;""",
    """--clusters=*) printf "CLUSTER: north\\n9 a\\nCLUSTER: west\\n7 RUN/submissions/2/x\\n";;""",
    """*) [ -n "$SBATCH_CLUSTERS$SLURM_CLUSTERS" ] || printf "10 a\\n8 b\\n";;""",
    "esac",
)


def test_each_cluster_is_asked_for_its_own_jobs(tmp_path: Path) -> None:
    """Equal numbers on two of them are two jobs."""
    run_dir = tmp_path / "run"
    submitted(run_dir, "9;east", "7;north", "10")
    (run_dir / "submissions/2/jobs").unlink()  # sbatch heard no answer
    env = squeue(tmp_path, *(line.replace("RUN", str(run_dir)) for line in CLUSTERS))
    env |= {"SBATCH_CLUSTERS": "north,west", "SLURM_CLUSTERS": "south"}
    found = unfinished(run_dir, env)
    assert found == [Job(7, "west"), Job(9, "east"), Job(10)]
    with pytest.raises(QueueError) as error:
        demand_an_end(run_dir, found, "afterany:7:9:10")
    assert "job 7 on cluster west, 9 on cluster east, 10; cancel (scancel 10; scancel " in str(
        error.value
    ), "none can wait for jobs of several clusters"
    assert "scancel --clusters=west 7), wait or take another folder" in str(error.value)
    demand_an_end(run_dir, [Job(9, "east")], "afterany:9")


@pytest.mark.parametrize(
    "dependency", ["afterany:9:10", "afterok:10,afternotok:9", "afterok:1:9:10"]
)
def test_jobs_that_are_waited_for(dependency: str, tmp_path: Path) -> None:
    demand_an_end(tmp_path, [Job(9), Job(10)], dependency)


@pytest.mark.parametrize(
    "dependency", [None, "afterany:9", "after:9:10", "afterany:9?afterany:10", "singleton"]
)
def test_jobs_that_are_not(dependency: str | None, tmp_path: Path) -> None:
    with pytest.raises(QueueError) as error:
        demand_an_end(tmp_path, [Job(9), Job(10)], dependency)
    told = "job 9, 10; cancel (scancel 9 10), wait (--dependency afterany:9:10) or take another"
    assert told in str(error.value)


HOLD = """import sys; from pathlib import Path; from megatron_lite.submissions import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True); sys.stdin.read()"""


def test_one_submits_at_a_time_and_a_killed_one_locks_nobody_out(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(QueueError, match="another submission into it is under way"):
        alone(tmp_path).__enter__()
    other.kill()
    other.wait(timeout=10)
    with alone(tmp_path):
        assert next_folder(tmp_path).name == "1", "the lock's file is no submission"
    for pipe in (other.stdin, other.stdout):
        pipe.close()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone(tmp_path):
        assert "lock: no lock here (No locks available), so nothing" in capsys.readouterr().err
