"""The options of sbatch for a run, and how long before its time limit it is asked to leave.

launch/submit.py hands them over. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.config.errors import show
from megatron_lite.config.schema import LaunchConfig
from megatron_lite.json_lines import rows_of

FIRST_LEAD = 120
"""Seconds before the time limit at which a run is asked to leave, where nothing was measured."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Unusable(ValueError):
    """A value that sbatch, or the job, would take for something else."""


@dataclass(frozen=True)
class Shape:
    """Machines, and processes on each."""

    nodes: int
    tasks_per_node: int


def sbatch_options(
    launch: LaunchConfig, run_dir: Path, shape: Shape, limit: str | None
) -> list[str]:
    """One word an option, for the command line: there no SBATCH_ variable of a shell beats them.

    `limit` is the job's time limit as sbatch reads it, None where that is not known. Raises
    `Unusable`.
    """
    names = ("cpus_per_task", "partition", "account", "time")
    given = {name.replace("_", "-"): getattr(launch, name) for name in names}
    # Slurm replaces a single % and what follows it in a file's name.
    log = f"{_usable(run_dir)}/".replace("%", "%%") + "%x-%j.out"
    words = [
        f"--job-name={job_name(launch, run_dir)}",
        f"--nodes={shape.nodes}",
        f"--ntasks-per-node={shape.tasks_per_node}",
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        f"--output={log}",
        "--open-mode=append",
        f"--signal=USR1@{lead(run_dir, limit)}",
        "--requeue" if launch.requeue else "--no-requeue",
        "--export=ALL",
    ]
    for word in words:
        if _CONTROL.search(word):
            raise Unusable(f"{show(word)}: must have no control character")
    return words


def job_name(launch: LaunchConfig, run_dir: Path) -> str:
    """The config's, or the run folder's; Unusable where the log can't be named after it."""
    name = launch.job_name or run_dir.name
    if "/" in name:
        raise Unusable(
            f"launch.job_name = {show(name)}: must have no slash, since the log is named after it"
        )
    return name


def _usable(run_dir: Path) -> Path:
    """The folder itself; Unusable where PYTHONPATH or Slurm would read it as another."""
    for sign, why in (
        (":", "PYTHONPATH is split at it"),
        ("\\", "Slurm drops it from a log's name"),
    ):
        if sign in str(run_dir):
            raise Unusable(
                f"run folder {run_dir}: must have no {sign} since {why}; give another --run-dir"
            )
    return run_dir


def lead(run_dir: Path, limit: str | None) -> int:
    """Seconds before the limit at which the run must be asked to leave.

    Of the run's own slowest step and save so far, twice, and half a minute for the agreement;
    Unusable where a job is not as long as that.
    """
    log, whole = run_dir / "metrics.jsonl", limit_seconds(limit)
    rows = list(rows_of(log.read_text())) if log.is_file() else []
    saves = [row["elapsed_ms"] for row in rows if row["event"] == "save"]
    steps = [row["elapsed_ms_per_iteration"] for row in rows if row["event"] == "train"]
    if not saves or not steps:
        return FIRST_LEAD if whole is None else min(FIRST_LEAD, whole // 2)
    measured = int(30 + 2 * (max(saves) + max(steps)) / 1000)
    if whole is not None and measured >= whole:
        raise Unusable(
            f"time limit {limit}: must be longer than the {measured} s before its end at which the "
            f"run is asked to leave (half a minute and twice the slowest step and save of {log})"
        )
    return measured


def limit_seconds(limit: str | None) -> int | None:
    """Of a time as sbatch reads it: `limit_seconds("90")` is 5400, `limit_seconds("1-2")` 93600.

    None where there is no limit, or where sbatch has to judge the text.
    """
    match = _TIME.fullmatch(limit or "")
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:  # minutes, or minutes:seconds
        numbers.insert(0, 0)
    hours, minutes, left = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left or None
