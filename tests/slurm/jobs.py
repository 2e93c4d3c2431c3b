"""Jobs of the Slurm tests: submitted, waited for, compared with one that nothing happened to."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.distributed.small import layout, rows
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).parents[2]
LIMIT = 180.0
"""Seconds for whatever a test waits for; a loaded machine starts four ranks in half a minute."""
STEPS = 20
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def submit(
    slurm: Cluster,
    config: Path,
    run_dir: Path,
    *overrides: str,
    phase: str = "",
    seconds: float = 0.0,
    options: Sequence[str] = (),
    python: str = sys.executable,
) -> str:
    """Queue launch/train.sbatch on both nodes with two ranks each; returns the job's id.

    In the phase it lingers, each time for some seconds; run_dir/mark tells that it has begun.
    """
    sets = [word for value in [*layout(2, 1), *overrides] for word in ("--set", value)]
    env = {"PYTHON": python, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if phase:
        env |= {"PHASE": phase, "SECONDS": str(seconds), "MARK": str(run_dir / "mark")}
        lingering = f'exec {sys.executable} -c "import tests.slurm.slow as s; s.main()" "$@"'
        env["PYTHON"] = interpreter(run_dir, lingering)
    return slurm.run(
        *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", *options),
        *(f"--output={run_dir}/out", f"--chdir={ROOT}", ROOT / "launch/train.sbatch"),
        *(config, "--run-dir", run_dir, *sets),
        env=env,
    )


def interpreter(run_dir: Path, *lines: str) -> str:
    """A shell script that a job takes for Python; returns its path."""
    path = run_dir / "python"
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)
    return str(path)


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
