"""Which rank this process is, on which node, and where the ranks meet, as a launcher or Slurm says.

Pure but for `scontrol`, which is asked for a node's address. What the user sets wins. Called by
train.py and session.py.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

_RANGE = re.compile(r"^([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,]*)")
_DEEPSPEED_PORT = "29500"
_NO_STEP = 0xFFFFFFFA
"""From here on Slurm's numbers stand for shells that are no step of a job."""
FIRST_PORT, PORTS = 10_000, 20_000
"""Ports of jobs: below those that systems give to clients by themselves."""


def launch_facts(env: Mapping[str, str]) -> dict[str, int]:
    """World size, rank and local rank, from torchrun's or deepspeed's variables, else Slurm's.

    Empty where the process was started alone, as it is in the shell of an allocation.
    """
    if "WORLD_SIZE" in env:
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    elif _is_task(env):
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
    else:
        return {}
    facts = ("world_size", "rank", "local_rank")
    return {fact: int(env.get(name, 0)) for fact, name in zip(facts, names, strict=True)}


def _is_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process with others; not the shell of a batch script, of salloc or
    of `srun --pty`."""
    step, tasks = env.get("SLURM_STEP_ID", ""), env.get("SLURM_STEP_NUM_TASKS", "")
    return step.isdecimal() and int(step) < _NO_STEP and tasks.isdecimal() and int(tasks) > 1


def node_name(env: Mapping[str, str]) -> str:
    """What people are told as this machine's name: Slurm's, which its commands take, where there is
    one. What looks for processes of this machine needs the host's own, which several of Slurm's
    nodes may share."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def which_start(env: Mapping[str, str]) -> tuple[str, int]:
    """What all ranks of one start of a job, and of no other, have in common, as far as launchers
    tell; and how many starts there were before it."""
    count = env.get("TORCHELASTIC_RESTART_COUNT") or env.get("SLURM_RESTART_COUNT") or "0"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return "/".join([count, *(env.get(name, "") for name in names)]), int(count)


def meeting_point(env: Mapping[str, str], *, launcher: int = 0) -> tuple[str, int] | None:
    """Host and port of rank 0; None where neither the user nor a launcher nor Slurm names them.

    Under Slurm the host is the step's first node, and the port follows from job and step, so that
    two jobs on a node have two. deepspeed's launcher gives all jobs the same port unless it is told
    another one; on a single node one that follows from its process id, `launcher`, replaces it.
    """
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if env.get("CROSS_SIZE") == "1" and port == _DEEPSPEED_PORT:
        port = str(job_port(launcher, 0))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if address is None and nodes is not None:
        address = _address(first_node(nodes))
    if port is None and "SLURM_JOB_ID" in env:
        port = str(job_port(int(env["SLURM_JOB_ID"]), int(env.get("SLURM_STEP_ID", 0))))
    if address is None or port is None:
        return None
    return address, int(port)


def job_port(job: int, step: int) -> int:
    """A port for a step of a job; jobs near in number have different ones."""
    return FIRST_PORT + (job * 31 + step) % PORTS


def first_node(nodes: str) -> str:
    """The first of a Slurm node list such as `gpu[007-012,020],login1`."""
    match = _RANGE.match(nodes)
    if match is None:
        raise ValueError(f"no Slurm node list: {nodes!r}")
    return match[1] + (match[2] or "") + match[3]


def _address(node: str) -> str:
    """Where a node is reached: Slurm knows it by another name than the network now and then."""
    command = ["scontrol", "show", "node", node, "--oneliner"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # in a container there is none: names agree
        return node
    found = re.search(r"\bNodeAddr=(\S+)", told.stdout)
    return node if found is None else found[1]
