"""Part 4 of launching: what is wrong with a node is told before the model is built, with its name.

Ranks of one machine; one of them is made to look like one on another, bad node (bad_node.py).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.health.preflight.group_speed import LIMIT
from tests.distributed.bad_node import HANG_LIMIT, STUCK_LIMIT
from tests.distributed.processes import Ended, arguments, fork_main
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import make_trainer, train
from tests.distributed.small import layout, small_config


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step, with a folder of checkpoints."""
    return small_config(
        tmp_path_factory.mktemp("preflight") / "run.json",
        corpus,
        training={"train_iters": 1},
        checkpoint={"save": "checkpoints"},
    )


def start(config: Path, run_dir: Path, *overrides: str, **env: str) -> list[Ended]:
    """Four ranks, tensor 2 × data 2."""
    argv = arguments(config, run_dir, *layout(2, 1), *overrides)
    return fork_main(argv, processes=4, env=env)


def status(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())


def record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "preflight.json").read_text())


def assert_failed(ended: list[Ended], run_dir: Path) -> str:
    """All ranks ended with 1, rank 0 alone told why; returns that, which status.json has too."""
    assert [one.code for one in ended] == [1] * len(ended), [one.err for one in ended]
    assert "Traceback" not in "".join(one.err for one in ended)
    found = status(run_dir)
    assert found["state"] == "failed" and found["error"] in ended[0].err
    assert not any("preflight" in one.err for one in ended[1:])
    assert "tensor 2 x" not in ended[0].out, "the model was built before"
    assert not list(run_dir.glob("**/.preflight*")), "meeting places are left"
    return found["error"]


def test_a_healthy_job_says_what_it_runs_on(config: Path, tmp_path: Path) -> None:
    ended = start(config, tmp_path)
    assert [one.code for one in ended] == [0] * 4, ended[0].err
    told = [line for line in ended[0].out.splitlines() if line.startswith(" preflight |")]
    assert len(told) == 3 and "4 ranks on 1 node: " in told[0] and "torch 2." in told[0]
    assert "checkpoint.save" in told[1] and "world" in told[2] and "(2 groups)" in told[2]
    assert not any("preflight" in one.out for one in ended[1:])
    found = record(tmp_path)
    assert found["faults"] == [] and sorted(found["ranks"]) == ["0", "1", "2", "3"]
    assert all(not rank["must_agree"] for rank in found["ranks"].values())
    kinds = [(group["kind"], group["ranks"]) for group in found["groups"]]
    assert kinds == [
        ("world", [0, 1, 2, 3]),
        *(("tensor", ranks) for ranks in ([0, 1], [2, 3])),
        *(("data", ranks) for ranks in ([0, 2], [1, 3])),
        *(("model", ranks) for ranks in ([0, 1], [2, 3])),
    ]
    assert all(group["correct"] and group["gb_per_second"] > 0 for group in found["groups"])
    assert not list(tmp_path.glob("**/.preflight*"))


def test_all_that_is_wrong_with_a_node_is_told_at_once(config: Path, tmp_path: Path) -> None:
    bad = "3:gpu7:code,torch,clock,nccl,readonly"
    ended = start(config, tmp_path, BAD_NODE=bad)
    error = assert_failed(ended, tmp_path)
    faults = record(tmp_path)["faults"]
    assert all(fault in error and "rank 3 on node gpu7: " in fault for fault in faults)
    assert any("code is another, on the 3 others it is " in fault for fault in faults)
    assert any("torch is 2.12.0, on the 3 others it is 2.13" in fault for fault in faults)
    assert any("run folder" in fault and "Read-only file system" in fault for fault in faults)
    assert len(faults) == 3, faults
    for warning in ("the clock is 400.0 s ahead of that of ", "NCCL_ALGO is Tree, on the 3 others"):
        assert f"warning: preflight: rank 3 on node gpu7: {warning}" in ended[0].err


def test_another_folder_under_the_same_name(config: Path, tmp_path: Path) -> None:
    """A run folder that one node has not mounted; launch.preflight is nodes."""
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {"BAD_NODE": "1:gpu7:elsewhere", "ELSEWHERE": str(elsewhere)}
    ended = start(config, run_dir, "launch.preflight=nodes", **env)
    error = assert_failed(ended, run_dir)
    assert error == (
        f"preflight: rank 1 on node gpu7: run folder {elsewhere}: is not the folder that rank 0 "
        "has under this name"
    )
    assert list(elsewhere.iterdir()) == []


def test_a_rank_that_is_stuck_in_its_files_is_named(config: Path, tmp_path: Path) -> None:
    ended = start(config, tmp_path, BAD_NODE="3:gpu7:stuck")
    assert [one.code for one in ended] == [1] * 4
    found = status(tmp_path)
    assert (found["state"], found["rank"]) == ("failed", 0)
    assert found["error"].startswith(
        f"preflight: rank 3 on node gpu7: not heard of within {STUCK_LIMIT:g} s"
    )
    assert "Traceback" not in "".join(one.err for one in ended[:3])


def test_a_rank_that_hangs_when_it_writes_is_named_on_many_nodes(
    config: Path, tmp_path: Path
) -> None:
    """Nobody blames rank 0, which waits for it, nor the others, which wait for rank 0."""
    ended = start(config, tmp_path, BAD_NODE="1:gpu1:frozen")
    error = assert_failed(ended, tmp_path)
    assert error.startswith("preflight: rank 1 on node gpu1: hangs when it writes in ")
    found = record(tmp_path)
    assert found["faults"] == [error.removeprefix("preflight: ")]
    assert sorted(found["clock_skews"]) == ["2", "3"], "the others' clocks are compared"


def test_an_all_reduce_that_does_not_end_is_told_with_its_group(
    config: Path, tmp_path: Path
) -> None:
    """Rank 3 does not come to the all-reduce of its tensor group: rank 2 waits, the others pass."""
    started = time.monotonic()
    ended = start(config, tmp_path, BAD_NODE="3:gpu7:hang")
    assert time.monotonic() - started < 30.0
    error = assert_failed(ended, tmp_path)
    assert f"did not end within {HANG_LIMIT:g} s" in error and HANG_LIMIT < LIMIT
    assert "the all-reduce over the tensor group of rank 2 on node " in error
    assert "and rank 3 on node gpu7 " in error


def asked_for(config: Path, overrides: list[str], run_dir: Path) -> list[int]:
    """The bytes for which room is asked: before training, and by the save at its end."""
    asked: list[int] = []
    require = store.require_space

    def listening(root: Path, wanted: int) -> None:
        asked.append(wanted)
        require(root, wanted)

    store.require_space = listening
    train(config, overrides, run_dir)
    return asked


def refused(config: Path, overrides: list[str], run_dir: Path) -> str:
    """What a trainer says that is made on a nearly full disk."""
    usage = SimpleNamespace(free=10_000)
    store.shutil = SimpleNamespace(disk_usage=lambda folder: usage)  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as told:
        make_trainer(config, overrides, run_dir)
    return str(told.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoint_that_will_not_fit_is_told_before_training(
    tp: int, config: Path, tmp_path: Path
) -> None:
    overrides = layout(tp, 1)
    (tmp_path / "run").mkdir()
    asked, *others = on_ranks(2, asked_for, config, overrides, tmp_path / "run")
    assert len(asked) == 2 and asked[0] == asked[1] > 10_000 and not any(others)
    left = tmp_path / "full/checkpoints/.global_step1.tmp"
    left.mkdir(parents=True)
    (left / "shard").write_bytes(b"x" * 1000)
    needed = store.in_bytes(asked[0] - 1000)
    for text in on_ranks(2, refused, config, overrides, tmp_path / "full"):
        assert f"{tmp_path}/full/checkpoints: {needed} are needed" in text
        assert left.is_dir(), "what a killed save left is the next save's to remove"


def test_it_can_be_left_out(config: Path, tmp_path: Path) -> None:
    off, nodes = tmp_path / "off", tmp_path / "nodes"
    argv = arguments(config, off, *layout(2, 1), 'launch.preflight="off"')
    ended = fork_main(argv, processes=2, env={"BAD_NODE": "1:gpu7:code"})
    assert [one.code for one in ended] == [0, 0], ended[0].err
    assert "preflight" not in ended[0].out and not (off / "preflight.json").exists()
    (alone,) = fork_main(arguments(config, nodes, "launch.preflight=nodes"))
    assert alone.code == 0 and "all-reduce" not in alone.out and record(nodes)["groups"] == []
