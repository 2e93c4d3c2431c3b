"""A rank that SIGSTOP holds: the doctor names it, the watchdog ends the job, nobody is left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.observation import records
from megatron_lite.health.processes import STOPPED, has_ended, state
from megatron_lite.health.record import Facts, RecordFile
from tests.distributed.processes import ROOT, WATCHDOG, arguments, fork_main
from tests.distributed.small import layout, small_config


def doctor(run_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/doctor.py", str(run_dir), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WATCHDOG)


def wait_for_a_stopped_rank(run_dir: Path) -> int:
    """Returns its process."""
    deadline = time.monotonic() + WATCHDOG
    while time.monotonic() < deadline:
        for record in records(run_dir).values():
            if state(record.facts.pid) in STOPPED:
                return record.facts.pid
        time.sleep(0.1)
    raise AssertionError("no rank was stopped")


def test_a_stopped_rank_is_named_and_the_job_ends(corpus: Path, tmp_path: Path) -> None:
    """Rank 1, the second stage, is stopped in the forward of iteration 3; the limit is 9 s."""
    config = small_config(tmp_path / "run.json", corpus)
    run_dir = tmp_path / "run"
    argv = arguments(config, run_dir, *layout(1, 2), "parallel.distributed_timeout_minutes=0.15")
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(fork_main, argv, processes=2, env={"FAULT": "stop:1:3"})
        pid = wait_for_a_stopped_rank(run_dir)
        told = doctor(run_dir, "--stacks")
        assert told.returncode == 1 and told.stderr == "error: rank 1 lags\n"
        for part in (
            f"rank 1 on {Path('/proc/sys/kernel/hostname').read_text().strip()} (process {pid}; ",
            "its process is stopped",
            "in forward-backward of iteration 3: F(stage 1, micro-batch 0)",
            "; rank 0 waits for it",
            "stacks of rank 0:",
            "in take",
            "no stacks of rank 1",
        ):
            assert part in told.stdout, told.stdout
        ended = job.result()
    assert [one.code for one in ended] == [1, -9]
    found = json.loads((run_dir / "status.json").read_text())
    assert (found["state"], found["rank"]) == ("failed", 1)
    assert "nothing has moved for 0.15 minutes" in found["error"]
    assert "rank 1 on " in found["error"] and "F(stage 1, micro-batch 0)" in found["error"]
    assert found["error"] in ended[0].err
    assert has_ended(pid)
    told = doctor(run_dir)
    assert told.returncode == 1 and told.stderr == "error: the run failed\n"
    assert "rank 1 ended it: nothing has moved" in told.stdout
    assert "in take" in told.stdout, "what rank 0 wrote by itself"


def test_the_doctor_finds_nothing_where_nothing_is(tmp_path: Path) -> None:
    told = doctor(tmp_path)
    assert told.returncode == 2 and "no run has started here" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_run_that_is_done_is_well(tmp_path: Path) -> None:
    """And a rank of an earlier start is not taken for its own."""
    for rank, launch in ((0, "second"), (1, "second"), (2, "first")):
        facts = Facts(rank=rank, world_size=2, host="node", pid=1, launch=launch, started=-rank)
        Heartbeat(RecordFile(tmp_path, facts)).at("ended", "done")
    (tmp_path / "status.json").write_text('{"state": "done"}')
    told = doctor(tmp_path)
    assert told.returncode == 0, told.stdout
    assert "done, 2 ranks\nno rank lags\n" in told.stdout
    assert told.stdout.count("ended") == 2
