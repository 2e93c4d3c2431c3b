"""Real jobs under torchrun and deepspeed: two at once, refusals, and no process left when something
dies. What follows when a rank does, under each launcher: tests/slurm/test_launchers.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.distributed.processes import WATCHDOG, Job, arguments, deepspeed, started, torchrun
from tests.distributed.small import layout, rows, small_config

LIMIT = 30.0
"""Seconds within which nothing of a broken job may be left."""


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An endless run that reads its batches in worker processes."""
    return small_config(
        tmp_path_factory.mktemp("launch") / "run.json",
        corpus,
        training={"train_iters": 1_000_000},
        data={"num_workers": 1},
    )


def status(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "status.json").read_text())


def wait_for_step(job: Job, run_dir: Path, number: int) -> None:
    """Until `number` steps are logged."""
    while not (run_dir / "metrics.jsonl").exists() or len(rows(run_dir)) < number:
        assert job.launcher.poll() is None, job.finish()
        assert time.monotonic() - job.started < WATCHDOG, "training did not start"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("launcher", "state"),
    [
        pytest.param(torchrun, "failed", id="torchrun"),
        # The process that was called is not the parent of the ranks: they have time to save.
        pytest.param(deepspeed, "requeue", id="deepspeed", marks=pytest.mark.every),
    ],
)
def test_b51_a_killed_launcher_takes_its_ranks_along(
    launcher: Callable[..., AbstractContextManager[Job]],
    state: str,
    config: Path,
    tmp_path: Path,
) -> None:
    """And the workers that read for them (data.num_workers)."""
    with launcher(2, config, tmp_path, *layout(1, 2)) as job:
        wait_for_step(job, tmp_path, 2)
        assert len(job.alive()) >= 1 + 2 + 2
        job.launcher.send_signal(signal.SIGKILL)
        job.launcher.wait()
        job.wait_until_empty(LIMIT)
    assert status(tmp_path)["state"] == state


@pytest.mark.every
def test_ctrl_c_under_deepspeed_leaves_a_checkpoint(config: Path, tmp_path: Path) -> None:
    """It goes to all processes, loader workers too; the launcher then sends SIGTERM to them all."""
    saving = [*layout(1, 2), 'checkpoint.save="checkpoints"']
    env = {"FAULT": "hang:0:3"}
    module = "tests.distributed.faulty"
    with deepspeed(2, config, tmp_path, *saving, module=module, env=env) as job:
        wait_for_step(job, tmp_path, 2)
        os.killpg(job.launcher.pid, signal.SIGINT)
        code, _, err = job.finish()
        job.wait_until_empty(LIMIT)
    assert code != 0, err
    found = status(tmp_path)
    assert (found["state"], found["reason"]) == ("requeue", "SIGINT"), err
    assert (tmp_path / f"checkpoints/global_step{found['iteration']}").is_dir()


def test_b51_ctrl_c_ends_a_job_that_hangs(config: Path, tmp_path: Path) -> None:
    """Both ranks wait for a message, where Python runs no signal handler."""
    module, env = "tests.distributed.faulty", {"FAULT": "wait:1:2"}
    with torchrun(2, config, tmp_path, *layout(1, 2), module=module, env=env) as job:
        wait_for_step(job, tmp_path, 1)
        time.sleep(1)
        os.killpg(job.launcher.pid, signal.SIGINT)
        start = time.monotonic()
        code, _, _ = job.finish(LIMIT)
        job.wait_until_empty(LIMIT)
    assert code != 0
    assert time.monotonic() - start < 20, "the launcher itself gives up after 30 s"
    assert status(tmp_path)["state"] == "failed"


@pytest.mark.parametrize("launcher", [torchrun, pytest.param(deepspeed, marks=pytest.mark.every)])
def test_b46_two_jobs_at_once(
    launcher: Callable[..., AbstractContextManager[Job]], config: Path, tmp_path: Path
) -> None:
    """Neither needs a port of its own to be named, and both train the same."""
    runs = [tmp_path / name for name in "ab"]
    short = [*layout(1, 2), "training.train_iters=3"]
    with launcher(2, config, runs[0], *short) as one, launcher(2, config, runs[1], *short) as other:
        for job, run_dir in zip((one, other), runs, strict=True):
            code, out, err = job.finish()
            assert code == 0, err
            assert out.count(" iteration        3/       3 |") == 1
            assert "Traceback" not in err
            assert status(run_dir) == {"state": "done", "iteration": 3}
            job.wait_until_empty(10)
    losses = [[row["lm_loss"] for row in rows(run_dir)] for run_dir in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.every
def test_deepspeeds_own_host_file(config: Path, tmp_path: Path) -> None:
    """Two nodes with a rank each, for which deepspeed is called on each of them."""
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\nother slots=1\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hosts)]
    command += ["--no_ssh", "--master_addr", "127.0.0.1", "--master_port", str(port)]
    words = arguments(config, tmp_path, *layout(1, 2), "training.train_iters=3")
    nodes = [
        [*command, "--node_rank", rank, "--module", "megatron_lite.train", *words] for rank in "01"
    ]
    with started(nodes[0]) as one, started(nodes[1]) as other:
        for job in (one, other):
            code, _, err = job.finish()
            assert code == 0, err
    assert status(tmp_path) == {"state": "done", "iteration": 3}


def test_a_refused_config_is_printed_once(config: Path, tmp_path: Path) -> None:
    with torchrun(2, config, tmp_path, "model.hiden_size=3", "optimizer.lr=-1") as job:
        code, out, err = job.finish()
        job.wait_until_empty(10)
    assert code != 0 and not out
    assert err.count("2 problems in the configuration") == 1
    assert err.count("model.hiden_size") == err.count("optimizer.lr") == 1
    assert status(tmp_path)["state"] == "refused"
    assert 'File "' not in err.split("problems in the configuration")[0], "no traceback of ours"
