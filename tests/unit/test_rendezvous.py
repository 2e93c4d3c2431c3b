"""B46: where ranks meet, and which rank each is, from the variables of launchers and of Slurm."""

from __future__ import annotations

import os

import pytest

from megatron_lite import rendezvous
from megatron_lite.rendezvous import (
    first_node,
    job_port,
    launch_facts,
    meeting_point,
    node_name,
    which_start,
)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("r[01-02]n7", "r01n7"),
        ("a-b.example.org,c", "a-b.example.org"),
    ],
)
def test_the_first_of_a_node_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_an_empty_list_is_told() -> None:
    with pytest.raises(ValueError, match="no Slurm node list"):
        first_node("")


def test_ranks_of_eight_tasks_on_two_nodes() -> None:
    """Rank 0 once, ranks 0 to 7 once each, and local ranks that begin anew on each node."""
    step = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}
    found = [
        launch_facts(step | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 4)}) for r in range(8)
    ]
    assert [f["rank"] for f in found] == list(range(8))
    assert [f["local_rank"] for f in found] == [0, 1, 2, 3] * 2
    assert {f["world_size"] for f in found} == {8}


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_NTASKS": "8", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc
        {"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty
    ],
)
def test_the_shell_of_an_allocation_is_no_rank(env: dict[str, str]) -> None:
    assert launch_facts(env) == {}
    torchrun = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
    assert launch_facts(env | torchrun) == {"world_size": 4, "rank": 3, "local_rank": 1}


def test_jobs_and_steps_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_address", lambda node: f"{node}.local")
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[4-5]", "SLURM_STEP_ID": "0"}
    assert meeting_point(job) == ("n4.local", job_port(77, 0))
    assert meeting_point(job | {"SLURM_STEP_NODELIST": "n5"}) == ("n5.local", job_port(77, 0))
    ports = {job_port(job, step) for job in range(500, 540) for step in range(3)}
    assert len(ports) == 120
    assert all(10_000 <= port < 30_000 for port in ports)


def test_jobs_of_deepspeeds_launcher_have_ports_of_their_own() -> None:
    """It gives every job the same one, unless it is told another one."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "CROSS_SIZE": "1"}
    assert meeting_point(given, launcher=77) == ("127.0.0.1", job_port(77, 0))
    assert meeting_point(given | {"MASTER_PORT": "4711"}, launcher=77) == ("127.0.0.1", 4711)
    several = given | {"CROSS_SIZE": "2"}
    assert meeting_point(several, launcher=77) == ("127.0.0.1", 29500), "all nodes have to agree"


def test_what_the_user_sets_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_address", lambda node: node)
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n4"}
    assert meeting_point(job | {"MASTER_ADDR": "here"}) == ("here", job_port(77, 0))
    assert meeting_point(job | {"MASTER_PORT": "9"}) == ("n4", 9)
    assert meeting_point({"MASTER_ADDR": "here", "MASTER_PORT": "9"}) == ("here", 9)
    assert meeting_point({"MASTER_ADDR": "here"}) is None
    assert meeting_point({}) is None


def test_people_are_told_slurms_name_of_a_node() -> None:
    """Its commands know no other; several of its nodes may be on one host."""
    assert node_name({"SLURMD_NODENAME": "gpu7"}) == "gpu7"
    assert node_name({}) == os.uname().nodename


def test_starts_are_told_apart() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "5"}
    starts = [
        slurm,
        slurm | {"SLURM_RESTART_COUNT": "1"},
        slurm | {"SLURM_STEP_ID": "1"},
        torchrun,
        torchrun | {"TORCHELASTIC_RESTART_COUNT": "1"},
        torchrun | {"MASTER_PORT": "6"},
        {},
    ]
    found = [which_start(env) for env in starts]
    assert len({launch for launch, _ in found}) == len(starts)
    assert [restart for _, restart in found] == [0, 1, 0, 0, 1, 0, 0]
    assert which_start(torchrun | {"RANK": "3", "LOCAL_RANK": "1"}) == found[3]
