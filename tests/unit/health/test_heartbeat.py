"""The file of a heartbeat, and which of those in a folder belong to the newest start."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.health.heartbeat import Counted, Heartbeat
from megatron_lite.health.observation import observe, records
from megatron_lite.health.record import GROUPS, Facts, RecordFile, path_of, read
from megatron_lite.pipeline.actions import Action

FACTS = Facts(rank=1, world_size=2, host="node-b", pid=7, place={"tp": 0, "pp": 1}, started=5.0)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    beat = Heartbeat(RecordFile(tmp_path, FACTS), FACTS)
    path = path_of(tmp_path, 1)
    assert read(path).facts == FACTS
    assert (read(path).position.phase, read(path).position.iteration) == ("start-up", 0)
    beat.count({"world": Counted(0, lambda: 12), "pipeline": Counted(1, lambda: 3)})
    beat.at("forward-backward", iteration=6)
    beat.doing(Action("F", 1, 3), waits_for=0)
    found = read(path)
    assert found.facts == replace(FACTS, groups={"world": 0, "pipeline": 1})
    assert (found.position.iteration, found.position.phase) == (6, "forward-backward")
    assert (found.position.doing, found.position.waits_for) == ("F(stage 1, micro-batch 3)", 0)
    assert found.position.changes == beat.changes == 3
    beat.doing("x" * 999)
    assert read(path).position.doing == "x" * 128 and read(path).position.waits_for is None
    assert beat.collectives() == [12, 0, 0, 0, 3, 0, 0]
    assert beat.file is not None
    beat.file.pulse(4, 99.5, 2.5, beat.collectives())
    pulse = read(path).pulse
    assert (pulse.count, pulse.time, pulse.still) == (4, 99.5, 2.5)
    assert dict(zip(GROUPS, pulse.collectives, strict=True))["world"] == 12


def test_a_new_start_replaces_the_file_and_the_old_process_can_not_write_it(tmp_path: Path) -> None:
    old = Heartbeat(RecordFile(tmp_path, FACTS), FACTS)
    new = Heartbeat(RecordFile(tmp_path, replace(FACTS, pid=8)))
    new.at("loading")
    old.at("save")
    found = read(path_of(tmp_path, 1))
    assert (found.facts.pid, found.position.phase) == (8, "loading")


def test_ranks_of_earlier_starts_are_left_out(tmp_path: Path) -> None:
    """Rank 2 did not come up again, rank 3 the present start does not have."""
    for rank, launch, started, world_size in (
        (0, "b", 20.0, 3),
        (1, "b", 21.0, 3),
        (2, "a", 10.0, 4),
        (3, "a", 10.0, 4),
    ):
        changes = {"rank": rank, "launch": launch, "started": started, "world_size": world_size}
        RecordFile(tmp_path, replace(FACTS, **changes))
    assert sorted(records(tmp_path)) == [0, 1]
    seen = observe(tmp_path, sleep=lambda seconds: None)
    assert (seen.world_size, seen.missing) == (3, [2])


def test_a_beat_is_what_changes_while_one_looks(tmp_path: Path) -> None:
    """Rank 0's clock is hours behind; rank 1 does not beat, and its machine is another one."""
    files = [RecordFile(tmp_path, replace(FACTS, rank=rank)) for rank in (0, 1)]
    files[1].pulse(5, 9e9, 0.0, [0] * len(GROUPS))
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        files[0].pulse(len(looks), 1.0, 0.0, [0] * len(GROUPS))

    seen = observe(tmp_path, sleep=sleep)
    assert [seen.ranks[rank].beats for rank in (0, 1)] == [True, False]
    assert 9 < sum(looks) < 12
    assert seen.ranks[1].state is None


def test_processes_of_this_machine_are_looked_at(tmp_path: Path) -> None:
    host = os.uname().nodename
    facts = replace(FACTS, rank=0, host=host, node="gpu7", pid=os.getpid(), born=1)
    RecordFile(tmp_path, facts)
    gone = observe(tmp_path, sleep=lambda seconds: None).ranks[0]
    assert gone.gone, "another process has its number now"
    assert gone.record.facts.machine == "gpu7", "to people it has Slurm's name"
    assert FACTS.machine == "node-b", "where there is none, the host's"


@pytest.mark.parametrize("content", [b"", b"x" * 2048, b"{}".ljust(2048)])
def test_other_files_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no heartbeats"):
        observe(tmp_path)
    path = path_of(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="rank_00000"):
        observe(tmp_path)
