"""launch/submit.py on a real Slurm: two time slices of one run, in a pretended container."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.distributed.small import layout, rows, small_config
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ENDED, LIMIT, ROOT, status


def test_a_chain_of_jobs_ends_what_one_begins(slurm: Cluster, corpus: Path, tmp_path: Path) -> None:
    """The first leaves after a step, since its minutes are over; the second takes the last one."""
    checkpoint = {"save": "checkpoints", "load": "checkpoints", "exit_on_missing_checkpoint": False}
    config = small_config(
        tmp_path / "run.json",
        corpus,
        training={"train_iters": 2, "exit_duration_in_mins": 1e-9},
        checkpoint=checkpoint,
        launch={"nodes": 2, "gpus_per_node": 1, "partition": "main", "time": "10"},
    )
    run_dir, site = tmp_path / "run", tmp_path / "site.env"
    facts = [f"CONTAINER={container(tmp_path)} image", "SRUN_OPTIONS=--cpu-bind=none"]
    shown = (ROOT / "launch/sites/example.env").read_text().splitlines()
    facts += [line for line in shown if line.startswith("SBATCH_EXCLUSIVE=")]
    site.write_text("\n".join([*facts, "OMP_NUM_THREADS=1", ""]))
    sets = [word for value in layout(2, 1) for word in ("--set", value)]
    printed = slurm.run(
        *(sys.executable, ROOT / "launch/submit.py", config, "--run-dir", run_dir),
        *("--site", site, "--chain", 2, *sets),
        env={"PYTHONPATH": str(ROOT)},
    )
    first, second = re.findall(r"^job +(\d+)$", printed, re.MULTILINE)
    assert slurm.wait(second, ENDED, LIMIT) == "COMPLETED", printed
    assert slurm.state(first) == "FAILED", "its exit code, 3, says that more is to be done"
    assert status(run_dir) == {"state": "done", "iteration": 2}
    assert [row["iteration"] for row in rows(run_dir)] == [1, 2]
    logs = [Path(path).read_text() for path in re.findall(r"^log +(\S+)$", printed, re.MULTILINE)]
    assert "left at iteration 1: exit_duration_in_mins is over" in logs[0]
    assert "saved so far: step 1" in logs[1]
    assert f"tensorboard --logdir {run_dir}" in printed
    for job in (first, second):
        calls = (tmp_path / f"container-{job}").read_text().splitlines()
        assert all(call.startswith(f"{run_dir}/code:") for call in calls), "the copy is used"
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
    """A program that notes what it is called with, drops the first word and runs the rest."""
    path = folder / "container"
    note = f'echo "$PYTHONPATH $*" >>{folder}/container-$SLURM_JOB_ID'
    path.write_text(f'#!/bin/sh\n{note}\nshift\nexec "$@"\n')
    path.chmod(0o755)
    return path
