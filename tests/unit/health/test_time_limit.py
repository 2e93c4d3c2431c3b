"""When a run leaves before a batch job's time is over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_lite.health import time_limit
from megatron_lite.health.time_limit import TimeLimit


@pytest.mark.parametrize(("left", "near"), [(26.0, False), (24.0, True), (-5.0, True)])
def test_twice_a_step_and_a_save_must_fit(
    left: float, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit.time, "time", lambda: 1000.0)
    limit = TimeLimit.of({"SLURM_JOB_END_TIME": f"{1000 + left:.0f}"})
    assert limit.is_near(step=2.0, save=8.0) is near


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_END_TIME": ""}])
def test_a_job_without_a_limit_ends_when_it_likes(env: dict[str, str]) -> None:
    assert not TimeLimit.of(env).is_near(step=1e9, save=1e9)


def test_an_end_that_is_no_time_is_named() -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME=tomorrow: must be seconds"):
        TimeLimit.of({"SLURM_JOB_END_TIME": "tomorrow"})


FACTS = """JobId=7 JobName=EndTime=1
   RunTime=00:00:30 TimeLimit={limit} TimeMin=N/A
   StartTime=900 EndTime={end} Deadline=N/A
   Command=x StartTime=9 EndTime=9"""
NOTHING = "slurm_load_jobs error: Unable to contact slurm controller"


@pytest.mark.parametrize(
    ("answer", "near", "end"),
    [
        (FACTS.format(limit="00:20:00", end=2000), False, 2000.0),
        (FACTS.format(limit="00:02:00", end=1019), True, 1019.0),  # that is not enough
        (FACTS.format(limit="00:02:00", end=1010), True, 1010.0),
        (FACTS.format(limit="UNLIMITED", end="Unknown"), False, float("inf")),
        (FACTS.format(limit="00:02:00", end="Unknown"), True, 1010.0),
        (NOTHING, True, 1010.0),
        (None, True, 1010.0),  # no such command
    ],
)
def test_an_end_that_was_moved_is_asked_for_once_it_is_near(
    answer: str | None, near: bool, end: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [900.0]
    monkeypatch.setattr(time_limit.time, "time", lambda: now[0])
    limit = TimeLimit.of(job(tmp_path, f"cat <<'END'\n{answer}\nEND" if answer else None))
    calls = tmp_path / "calls"
    assert not limit.is_near(step=2.0, save=4.0) and not calls.exists(), "nobody is asked for it"
    now[0] = 1000.0
    assert limit.is_near(step=2.0, save=4.0) is near and limit.end == end
    if answer is not None:
        assert calls.read_text() == "show job 5_3 %s\n", "an array's task by its own name"


@pytest.mark.parametrize("deaf", ["sleep 30", "kill -9 $$", "exit 1", "printf '\\377'"])
def test_no_answer_lets_no_run_miss_its_end(
    deaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "PATIENCE", 0.5)
    began = time.monotonic()
    assert TimeLimit.of(job(tmp_path, deaf)).is_near(step=2.0, save=4.0)
    assert time.monotonic() - began < 10


def job(folder: Path, answer: str | None) -> dict[str, str]:
    """The environment of an array's last task, with a scontrol that does something."""
    if answer is not None:
        lines = ["#!/bin/sh", f'echo "$* $SLURM_TIME_FORMAT" >>{folder}/calls', answer, ""]
        (folder / "scontrol").write_text("\n".join(lines))
        (folder / "scontrol").chmod(0o755)
    path = str(folder) if answer is None else f"{folder}{os.pathsep}{os.environ['PATH']}"
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
    return {"PATH": path, "SLURM_JOB_ID": "5", "SLURM_JOB_END_TIME": "1010", **array}
