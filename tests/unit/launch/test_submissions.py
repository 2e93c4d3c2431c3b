"""Which jobs of a run folder are not over, and whether a new one waits for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_lite.submissions import QueueError, demand_an_end, next_folder, note, unfinished


def squeue(folder: Path, *lines: str) -> dict[str, str]:
    """An environment with a squeue of these lines."""
    program = folder / "squeue"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SQUEUE_STATES": "RUNNING"}


def test_the_queue_is_asked_for_what_was_noted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    env = squeue(tmp_path, "echo it is down >&2; exit 1")
    assert unfinished(run_dir, env) == [], "it is not asked for nothing"
    for job in ("9", "10", "11"):
        folder = next_folder(run_dir)
        folder.mkdir(parents=True)
        note(folder, job)
    assert sorted(path.name for path in run_dir.glob("*/*")) == ["1", "2", "3"]
    with pytest.raises(QueueError, match=f"jobs of {run_dir} are over: it is down"):
        unfinished(run_dir, env)
    env = squeue(tmp_path, '[ -n "$SQUEUE_STATES" ] || printf "10\\n9\\n110\\n"')
    assert unfinished(run_dir, env) == ["9", "10"]


@pytest.mark.parametrize(
    "dependency", ["afterany:9:10", "afterok:10,afternotok:9", "afterok:1:9:10"]
)
def test_jobs_that_are_waited_for(dependency: str, tmp_path: Path) -> None:
    demand_an_end(tmp_path, ["9", "10"], dependency)


@pytest.mark.parametrize(
    "dependency", [None, "afterany:9", "after:9:10", "afterany:9?afterany:10", "singleton"]
)
def test_jobs_that_are_not(dependency: str | None, tmp_path: Path) -> None:
    with pytest.raises(QueueError) as error:
        demand_an_end(tmp_path, ["9", "10"], dependency)
    told = "job 9, 10; cancel (scancel 9 10), wait (--dependency afterany:9:10) or take another"
    assert told in str(error.value)
