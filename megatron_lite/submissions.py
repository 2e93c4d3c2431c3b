"""What was submitted into a run folder: a folder each time, and which of its jobs are not over.

    submissions/lock
    submissions/1/   code/  config.json  train.sbatch  jobs (one a line, as sbatch --parsable says)

A later submission has a folder of its own, so that nothing changes under a job that waits, runs or
is queued again. No torch; launch/submit.py calls it.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = "submissions"
JOBS = "jobs"
LOCK = "lock"
CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
"""Variables by which sbatch chooses another cluster; the first one counts."""
_HEAD = "CLUSTER: "
_AT_THE_END = ("afterany", "afternotok", "afterok")


class QueueError(Exception):
    """squeue can't be asked, or something is in the way of a further job."""


@dataclass(frozen=True, order=True)
class Job:
    """A job as sbatch names it; `cluster` is empty where sbatch was not told of any."""

    number: int
    cluster: str = ""

    @classmethod
    def of(cls, text: str) -> Job:
        """As sbatch --parsable prints it: `7` or `7;east`; ValueError for anything else."""
        number, _, cluster = text.partition(";")
        return cls(int(number), cluster)

    def parsable(self) -> str:
        """What `of` reads."""
        return f"{self.number};{self.cluster}" if self.cluster else str(self.number)

    def __str__(self) -> str:
        return f"{self.number} on cluster {self.cluster}" if self.cluster else str(self.number)


@contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Keep other submissions out of a run folder, as far as its file system has locks.

    QueueError while there is another one. The lock is the kernel's, which ends with its holder.
    """
    path = run_dir / FOLDER / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = path.open("a")
    except OSError as error:
        raise QueueError(
            f"run folder {run_dir}: can't be written ({error.strerror}); change --run-dir"
        ) from error
    with held as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QueueError(
                f"run folder {run_dir}: another submission into it is under way; look for its job "
                "when it has ended, or take another folder (--run-dir)"
            ) from None
        except OSError as error:
            print(
                f"warning: {path}: no lock here ({error.strerror}), so nothing keeps a submission "
                "into this run folder apart from another one at the same moment",
                file=sys.stderr,
            )
        yield


def next_folder(run_dir: Path) -> Path:
    """The folder of the next submission, which is not there yet."""
    there = [int(folder.name) for folder in _folders(run_dir)]
    return run_dir / FOLDER / str(max(there, default=0) + 1)


def _folders(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / FOLDER).glob("*") if path.name.isdecimal()]


def note(folder: Path, job: Job) -> None:
    """A job is submitted."""
    with (folder / JOBS).open("a") as file:
        file.write(f"{job.parsable()}\n")


def on_cluster(env: Mapping[str, str], cluster: str) -> dict[str, str]:
    """The environment by which Slurm's commands turn to one cluster; "" is the one that they turn
    to by themselves."""
    kept = {name: value for name, value in env.items() if name not in CLUSTERS}
    return {**kept, CLUSTERS[0]: cluster} if cluster else kept


def unfinished(run_dir: Path, env: Mapping[str, str]) -> list[Job]:
    """The run's jobs that wait or run, by squeue; QueueError where that fails."""
    asked, noted = set(), set()
    chosen = next((env[name] for name in CLUSTERS if env.get(name)), "")
    for folder in _folders(run_dir):
        log = folder / JOBS
        jobs = {Job.of(line) for line in log.read_text().split()} if log.exists() else set()
        # Of some submissions sbatch itself may not know whether they succeeded.
        asked |= {job.cluster for job in jobs} or {chosen}
        noted |= jobs
    scripts = f"{run_dir / FOLDER}/"
    return sorted(
        {
            job
            for cluster in asked
            for job, command in _queue(run_dir, env, cluster)
            if job in noted or command.startswith(scripts)
        }
    )


def _queue(run_dir: Path, env: Mapping[str, str], cluster: str) -> Iterator[tuple[Job, str]]:
    """All jobs of a cluster, or of several with commas between, and the script of each."""
    # SQUEUE_ variables would hide jobs; %F is what sbatch gave, of an array, too.
    kept = {name: value for name, value in env.items() if not name.startswith("SQUEUE_")}
    done = subprocess.run(
        ["squeue", *_at(cluster), "--all", "--noheader", "--format=%F %o"],
        env=on_cluster(kept, ""),
        capture_output=True,
        text=True,
        errors="surrogateescape",  # as in paths; jobs of others may have any name
        check=False,
    )
    if done.returncode:
        raise QueueError(
            f"squeue can't tell whether jobs of {run_dir} are over: {done.stderr.strip()}"
        )
    for line in done.stdout.splitlines():
        if line.startswith(_HEAD):  # which is there once clusters were named
            cluster = line.removeprefix(_HEAD).strip()
            continue
        number, _, command = line.strip().partition(" ")
        if number.isdecimal():
            yield Job(int(number), cluster), command


def _at(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def demand_an_end(run_dir: Path, jobs: Sequence[Job], dependency: str | None) -> None:
    """QueueError unless a job with sbatch's --dependency begins only after all these have ended.

    Two jobs at once would write into the same files.
    """
    numbers, clusters = [str(job.number) for job in jobs], {job.cluster for job in jobs}
    if set(numbers) <= _waited_for(dependency) and len(clusters) < 2:
        return
    cancel = [
        " ".join(["scancel", *_at(cluster), *(str(j.number) for j in jobs if j.cluster == cluster)])
        for cluster in sorted(clusters)
    ]
    # Slurm lets no job wait for one of another cluster.
    wait = f"wait (--dependency afterany:{':'.join(numbers)})" if len(clusters) == 1 else "wait"
    raise QueueError(
        f"run folder {run_dir}: still waiting or running: job {', '.join(map(str, jobs))}; cancel "
        f"({'; '.join(cancel)}), {wait} or take another folder (--run-dir)"
    )


def _waited_for(dependency: str | None) -> set[str]:
    if dependency is None or "?" in dependency:  # one of several is enough for it
        return set()
    parts = [part.split(":") for part in dependency.split(",")]
    return {job for kind, *jobs in parts if kind in _AT_THE_END for job in jobs}
