"""A Slurm of two nodes on this machine: private munge, controller and daemons on free ports.

Its daemons run in the foreground as children of this process, and are ended by their process ids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
START = 30.0
"""Seconds within which the nodes must be there."""
CPUS = 4
# A job that is queued again waits until the credentials of its last start have expired, by default
# for two minutes; cred_expire shortens that.
_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=600
SlurmdTimeout=20
SchedulerParameters=bf_interval=5,sched_interval=5
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """What of Slurm this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass
class Cluster:
    """The running cluster; `run` is for its commands."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a shell on a login node has."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: object, env: Mapping[str, str] | None = None) -> str:
        """Output of a command; AssertionError with its errors if it fails."""
        done = subprocess.run(
            [*map(str, command)],
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Of a job, as squeue would say: PENDING, RUNNING, COMPLETED, …"""
        facts = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return next(fact for fact in facts if fact.startswith("JobState=")).partition("=")[2]

    def wait(self, job: str, states: Sequence[str], timeout: float) -> str:
        """Until the job is in one of the states; AssertionError with its facts after `timeout`."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            if time.monotonic() > deadline:
                raise AssertionError(self.run("scontrol", "show", "job", job))
            time.sleep(0.2)
        return state

    def wait_for_step(self, job: str, timeout: float) -> None:
        """Until the job's first srun has begun."""
        deadline = time.monotonic() + timeout
        while f"{job}.0" not in self.run("squeue", "--steps", "--noheader", "--format=%i").split():
            assert time.monotonic() < deadline, self.run("scontrol", "show", "job", job)
            time.sleep(0.05)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start one, whose files lie in `folder`, and end it."""
    made = Cluster(folder)
    ports = free_ports(3)
    nodes = [
        f"NodeName=n{n} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[n]} CPUs={CPUS}"
        for n in (1, 2)
    ]
    (folder / "slurm.conf").write_text(
        _CONF.format(folder=folder, controller=ports[0], nodes="\n".join(nodes))
    )
    (folder / "state").mkdir()
    try:
        _start_munge(made)
        _start(made, "slurmctld", "slurmctld", "-D", "-i", "-f", folder / "slurm.conf")
        for name in ("n1", "n2"):
            start_node(made, name)
        _wait_for_nodes(made)
        yield made
    finally:
        stop(made)


def start_node(made: Cluster, name: str) -> None:
    """Start a node's daemon."""
    _start(made, name, "slurmd", "-D", "-N", name, "-f", made.folder / "slurm.conf")


def stop(made: Cluster) -> None:
    """End all daemons, the nodes first: they end their jobs' processes."""
    for job in _jobs(made):
        with contextlib.suppress(AssertionError):
            made.run("scancel", "--full", "--signal=KILL", job)
            made.run("scancel", job)
    for name in sorted(made.daemons, key=lambda one: one not in ("n1", "n2")):
        daemon = made.daemons[name]
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _jobs(made: Cluster) -> list[str]:
    with contextlib.suppress(AssertionError):
        return made.run("squeue", "--noheader", "--format=%A").split()
    return []


def _start(made: Cluster, name: str, *command: object) -> None:
    log = (made.folder / f"{name}.out").open("wb")
    made.daemons[name] = subprocess.Popen(
        [*map(str, command)], env=made.environment, stdout=log, stderr=log, start_new_session=True
    )
    log.close()


def _start_munge(made: Cluster) -> None:
    munge = made.folder / "munge"
    munge.mkdir(mode=0o700)
    key = munge / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    paths = {
        "key-file": key,
        "socket": munge / "socket",
        "pid-file": munge / "pid",
        "log-file": munge / "log",
        "seed-file": munge / "seed",
    }
    flags = [f"--{name}={path}" for name, path in paths.items()]
    _start(made, "munged", "munged", "--foreground", "--force", *flags)
    deadline = time.monotonic() + START
    while not (munge / "socket").exists():
        assert time.monotonic() < deadline, (made.folder / "munged.out").read_text()
        time.sleep(0.1)


def _wait_for_nodes(made: Cluster) -> None:
    deadline, said = time.monotonic() + START, ""
    while time.monotonic() < deadline:
        with contextlib.suppress(AssertionError):
            said = made.run("sinfo", "--noheader", "--partition=main", "--Node", "--format=%N %T")
            if said.split() == ["n1", "idle", "n2", "idle"]:
                return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(made.folder.glob("*.log")))
    raise AssertionError(f"the nodes are not there after {START} s: {said}\n{logs}")
