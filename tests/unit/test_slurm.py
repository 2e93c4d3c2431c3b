"""What a batch script is told: start, stop after fruitless restarts, queue again, or end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite import slurm


@pytest.fixture
def words(small_run: dict[str, Any], tmp_path: Path) -> list[str]:
    """Arguments of a run that is queued again."""
    kept = {"save": "c", "load": "c", "exit_on_missing_checkpoint": False}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run | {"checkpoint": kept, "launch": {"requeue": True}}))
    return [str(path), "--run-dir", str(tmp_path / "run")]


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Calls of scontrol, which does nothing here."""
    found: list[list[str]] = []

    class Done:
        returncode = 1

    def run(command: list[str], **_: object) -> Done:
        found.append(command)
        return Done()

    monkeypatch.setattr(slurm.subprocess, "run", run)
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return found


def starts(words: list[str], monkeypatch: pytest.MonkeyPatch, restart: int) -> int:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
    return slurm.main(["begin", *words])


def test_two_restarts_without_progress_are_enough(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "run/c"
    assert starts(words, monkeypatch, 0) == starts(words, monkeypatch, 1) == 0
    (saved / "global_step5").mkdir(parents=True)
    assert [starts(words, monkeypatch, n) for n in (2, 3)] == [0, 0]
    assert starts(words, monkeypatch, 4) == 1
    assert "2 restarts in a row brought no new checkpoint (still step 5)" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    assert slurm.main(["begin", *words]) == 0, "another job begins to count anew"


@pytest.mark.parametrize(
    ("status", "code", "again", "left"),
    [
        ({"state": "done", "iteration": 9}, 0, False, 0),
        ({"state": "requeue", "iteration": 4, "reason": "SIGUSR1"}, 3, True, 3),
        ({"state": "running"}, 137, True, 3),
        ({"state": "failed", "error": "ended without a word: killed"}, 1, True, 3),
        ({"state": "failed", "error": "ValueError: no"}, 1, False, 1),
        ({"state": "refused", "error": "no"}, 2, False, 2),
        ({}, 2, False, 2),
    ],
)
def test_what_follows_an_end(
    status: dict[str, Any],
    code: int,
    again: bool,
    left: int,
    words: list[str],
    requeued: list[list[str]],
    tmp_path: Path,
) -> None:
    """`left`: the exit code of the batch script, where scontrol does not end it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text(json.dumps(status))
    assert slurm.main(["end", str(code), *words]) == left
    assert requeued == ([["scontrol", "requeue", "12"]] if again else [])
    requeued.clear()
    quiet = [*words, "--set", "launch.requeue=false"]
    assert slurm.main(["end", str(code), *quiet]) == (code or left)
    assert requeued == []
