"""launch/submit.py on a real Slurm: two time slices of one run, in a pretended container."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.distributed.small import layout, rows, small_config
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ENDED, LIMIT, ROOT, status

ODD = "$HOME 'two  words' 64(x2)"
SHELL = {
    "SBATCH_EXPORT": "NONE",
    "SBATCH_JOB_NAME": "other",
    "SBATCH_REQUEUE": "1",
    "SBATCH_OPEN_MODE": "truncate",
    "SBATCH_OUTPUT": "/dev/null",
    "SBATCH_PARTITION": "none",
    "SBATCH_SIGNAL": "KILL@1",
    "SBATCH_TIMELIMIT": "1",
    "SLURM_EXPORT_ENV": "NONE",
}
"""What a user may have set for other jobs."""
SEEN = """import json, os, megatron_lite
rank, *rest = map(os.environ.get, ("SLURM_PROCID", "SRUN_CPUS_PER_TASK", "ODD"))
print(json.dumps([rank, megatron_lite.__file__, *rest]))"""


def test_a_chain_of_jobs_ends_what_one_begins(
    slurm: Cluster, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first leaves after a step, since its minutes are over; the second takes the last one."""
    monkeypatch.chdir(ROOT)  # where Python would find the code without its copy
    checkpoint = {"save": "checkpoints", "load": "checkpoints", "exit_on_missing_checkpoint": False}
    config = small_config(
        tmp_path / "run.json",
        corpus,
        training={"train_iters": 2, "exit_duration_in_mins": 1e-9},
        checkpoint=checkpoint,
        launch={"nodes": 2, "gpus_per_node": 1, "partition": "main", "time": "10"},
    )
    run_dir, site = tmp_path / "a run, 100%j", tmp_path / "site.env"
    facts = [f"CONTAINER={container(tmp_path)} image", "SRUN_OPTIONS=--cpu-bind=none"]
    shown = (ROOT / "launch/sites/example.env").read_text().splitlines()
    facts += [line for line in shown if line.startswith("SBATCH_EXCLUSIVE=")]
    site.write_text("\n".join([*facts, "OMP_NUM_THREADS=1", f"ODD={ODD}", ""]))
    values = [*layout(2, 1), "launch.cpus_per_task=2"]
    sets = [word for value in values for word in ("--set", value)]
    program = (sys.executable, ROOT / "launch/submit.py", config, "--run-dir", run_dir, *sets)
    env = SHELL | {"PYTHONPATH": str(ROOT)}
    printed = slurm.run(*program, "--site", site, "--chain", 2, env=env)
    first, second = re.findall(r"^job +(\d+)$", printed, re.MULTILINE)
    with pytest.raises(AssertionError, match=f"waiting or running: job .*{second}; cancel"):
        slurm.run(*program, env=env)
    told = slurm.run("scontrol", "show", "job", second).split()
    assert {"CPUs/Task=2", "Requeue=0", "TimeLimit=00:10:00", "Partition=main"} <= {*told}
    assert slurm.wait(second, ENDED, LIMIT) == "COMPLETED", printed
    assert slurm.state(first) == "FAILED", "its exit code, 3, says that more is to be done"
    assert status(run_dir) == {"state": "done", "iteration": 2}
    assert [row["iteration"] for row in rows(run_dir)] == [1, 2]
    logs = [Path(path).read_text() for path in re.findall(r"^log +(.+)$", printed, re.MULTILINE)]
    assert "left at iteration 1: exit_duration_in_mins is over" in logs[0]
    assert "saved so far: step 1" in logs[1]
    assert f"tensorboard --logdir {shlex.quote(str(run_dir))}" in printed
    copy = f"{run_dir}/submissions/1/code/megatron_lite/__init__.py"
    for job in (first, second):
        seen = [json.loads(line) for line in (tmp_path / f"seen-{job}").read_text().splitlines()]
        assert sorted(rank for rank, *_ in seen) == ["0", "0", "0", "1"], "two of one task each"
        assert {tuple(rest) for _, *rest in seen} == {(copy, "2", ODD)}
        calls = (tmp_path / f"container-{job}").read_text().splitlines()
        asked = [
            re.search(r" -m (megatron_lite\.train|megatron_lite\.slurm \w+)", c) for c in calls
        ]
        assert sorted(match[1] for match in asked if match) == [
            "megatron_lite.slurm begin",
            "megatron_lite.slurm end",
            "megatron_lite.train",
            "megatron_lite.train",
        ]


def container(folder: Path) -> Path:
    """A program that notes what it is called with and what Python finds there, drops the first word
    and runs the rest."""
    path, python = folder / "container", shlex.quote(sys.executable)
    note = f'echo "$*" >>{folder}/container-$SLURM_JOB_ID'
    look = f"{python} -c {shlex.quote(SEEN)} >>{folder}/seen-$SLURM_JOB_ID"
    path.write_text(f'#!/bin/sh\n{note}\n{look}\nshift\nexec "$@"\n')
    path.chmod(0o755)
    return path
