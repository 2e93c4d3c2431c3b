"""Options that Slurm would misread, and how long before its limit a run is asked to leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.config.schema import LaunchConfig
from megatron_lite.sbatch_options import Shape, Unusable, lead, limit_seconds, sbatch_options


def test_a_percent_sign_stays_one(tmp_path: Path) -> None:
    words = sbatch_options(LaunchConfig(), tmp_path / "a 9%j", Shape(1, 1), None)
    assert f"--output={tmp_path}/a 9%%j/%x-%j.out" in words and "--job-name=a 9%j" in words


@pytest.mark.parametrize(
    ("folder", "values", "told"),
    [
        ("run", {"job_name": "team/run"}, 'launch.job_name = "team/run": must have no slash'),
        ("run", {"partition": "a\nb"}, "must have no control character"),
        ("12:30", {}, "must have no : since PYTHONPATH"),
        ("a\\b", {}, "must have no \\ since Slurm"),
    ],
)
def test_what_would_be_misread(
    folder: str, values: dict[str, str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(Unusable) as error:
        sbatch_options(LaunchConfig(**values), tmp_path / folder, Shape(1, 1), None)
    assert told in str(error.value)


def test_the_lead_follows_from_what_was_measured(tmp_path: Path) -> None:
    rows = [{"event": "train", "elapsed_ms_per_iteration": ms} for ms in (900, 20_000, 1000)]
    rows += [{"event": "save", "elapsed_ms": 100_000}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"event": "tra')  # the run was killed there
    assert lead(tmp_path, None) == lead(tmp_path, "5") == 270
    with pytest.raises(Unusable, match="time limit 4:30: must be longer than the 270 s"):
        lead(tmp_path, "4:30")


def test_the_first_lead_leaves_time_to_train(tmp_path: Path) -> None:
    assert [lead(tmp_path, limit) for limit in (None, "5", "2")] == [120, 120, 60]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:01", 7201),
        ("1-2", 93_600),
        ("1-2:30", 95_400),
        ("1-2:30:05", 95_405),
        ("0", None),
        ("UNLIMITED", None),
        ("soon", None),
        (None, None),
    ],
)
def test_times_as_sbatch_reads_them(limit: str | None, expected: int | None) -> None:
    assert limit_seconds(limit) == expected
