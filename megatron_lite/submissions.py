"""What was submitted into a run folder: a folder each time, and which of its jobs are not over.

    submissions/1/   code/  config.json  train.sbatch  jobs (their numbers, one a line)

A later submission has a folder of its own, so that nothing changes under a job that waits, runs or
is queued again. No torch; launch/submit.py calls it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = "submissions"
JOBS = "jobs"
_AT_THE_END = ("afterany", "afternotok", "afterok")


class QueueError(Exception):
    """squeue can't be asked, or a job that it shows is in the way."""


def next_folder(run_dir: Path) -> Path:
    """The folder of the next submission, which is not there yet."""
    there = [int(path.name) for path in (run_dir / FOLDER).glob("*") if path.name.isdecimal()]
    return run_dir / FOLDER / str(max(there, default=0) + 1)


def note(folder: Path, job: str) -> None:
    """A job is submitted."""
    with (folder / JOBS).open("a") as file:
        file.write(f"{job}\n")


def unfinished(run_dir: Path, env: Mapping[str, str]) -> list[str]:
    """Numbers of the run's jobs that wait or run, by squeue; QueueError where that fails."""
    noted = {job for log in (run_dir / FOLDER).glob(f"*/{JOBS}") for job in log.read_text().split()}
    if not noted:
        return []
    # SQUEUE_ variables would hide jobs; %F is what sbatch gave, of an array, too.
    done = subprocess.run(
        ["squeue", "--all", "--noheader", "--format=%F"],
        env={name: value for name, value in env.items() if not name.startswith("SQUEUE_")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise QueueError(
            f"squeue can't tell whether jobs of {run_dir} are over: {done.stderr.strip()}"
        )
    return sorted(noted & set(done.stdout.split()), key=int)


def demand_an_end(run_dir: Path, jobs: Sequence[str], dependency: str | None) -> None:
    """QueueError unless a job with sbatch's --dependency begins only after all these have ended.

    Two jobs at once would write into the same files.
    """
    if set(jobs) <= _waited_for(dependency):
        return
    raise QueueError(
        f"run folder {run_dir}: still waiting or running: job {', '.join(jobs)}; cancel (scancel "
        f"{' '.join(jobs)}), wait (--dependency afterany:{':'.join(jobs)}) or take another folder "
        "(--run-dir)"
    )


def _waited_for(dependency: str | None) -> set[str]:
    if dependency is None or "?" in dependency:  # one of several is enough for it
        return set()
    parts = [part.split(":") for part in dependency.split(",")]
    return {job for kind, *jobs in parts if kind in _AT_THE_END for job in jobs}
