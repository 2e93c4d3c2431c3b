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
    ("states", "code"),
    [
        ("REQUEUED\nPREEMPTED\nREQUEUED\nRUNNING", 0),
        ("PREEMPTED\nREQUEUED\nNODE_FAIL\nRUNNING", 1),
        ("", 1),
    ],
)
def test_a_start_that_made_room_for_another_job_does_not_count(
    states: str, code: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EARLIER_STARTS", states)
    assert [starts(words, monkeypatch, n) for n in range(4)][2:] == [code, code]


def test_half_a_line_of_an_earlier_start_stops_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starts(words, monkeypatch, 0) == 0
    log = tmp_path / "run/restarts.jsonl"
    log.write_text(log.read_text() + '{"job": "12", "re')
    assert [starts(words, monkeypatch, n) for n in (1, 2)] == [0, 1]
    assert [line[:11] for line in log.read_text().splitlines()] == ['{"job": "12'] * 4


def test_a_job_that_is_not_to_be_queued_again_says_so(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starts([*words, "--set", "launch.requeue=false"], monkeypatch, 0) == slurm.ONCE


@pytest.mark.parametrize(
    ("status", "code", "left", "alone"),
    [
        ({"state": "done", "iteration": 9}, "0", 0, 0),
        ({"state": "done", "iteration": 9}, "time-limit", 0, 0),
        ({"state": "requeue", "iteration": 4, "reason": "SIGUSR1"}, "3", slurm.AGAIN, 3),
        ({"state": "running"}, "137", slurm.AGAIN, 137),
        ({"state": "failed", "error": "ended without a word: killed"}, "1", slurm.AGAIN, 1),
        ({"state": "failed", "error": "stopped by SIGTERM"}, "143", slurm.AGAIN, 143),
        ({"state": "failed", "error": "stopped by SIGTERM"}, "time-limit", slurm.AGAIN, 1),
        ({"state": "requeue", "iteration": 4, "reason": "x"}, "time-limit", slurm.AGAIN, 3),
        ({"state": "failed", "error": "rank 2 lags", "hung": True}, "1", slurm.AGAIN, 1),
        ({"state": "failed", "error": "closed", "lost_peer": True}, "1", slurm.AGAIN, 1),
        ({"state": "refused", "error": "timed out", "unmet": True}, "2", slurm.AGAIN, 2),
        ({"state": "failed", "error": "ValueError: no"}, "1", 1, 1),
        ({"state": "refused", "error": "no"}, "2", 2, 2),
        ({}, "2", 2, 2),
        ({}, "137", slurm.AGAIN, 137),
        ({}, "143", slurm.AGAIN, 143),  # told to make room when it had just begun
    ],
)
def test_what_follows_an_end(
    status: dict[str, Any], code: str, left: int, alone: int, words: list[str], tmp_path: Path
) -> None:
    """`left`: the exit code; `alone`: where the config does not ask for requeue."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text(json.dumps(status))
    assert slurm.main(["end", code, *words]) == left
    assert slurm.main(["end", code, *words, "--set", "launch.requeue=false"]) == alone


def test_a_start_that_crashes_is_not_taken_for_the_one_before(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text('{"state": "requeue", "iteration": 4}')
    assert starts(words, monkeypatch, 1) == 0
    assert slurm.main(["end", "1", *words]) == 1, "it ended before it had written a status"
