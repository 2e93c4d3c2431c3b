"""A run on two hosts of a host file, which are this machine twice, by way of a pretended ssh."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.distributed.processes import MARK, ROOT, arguments, started
from tests.distributed.small import layout, rows, small_config


def test_b51_a_killed_rank_ends_the_job_on_both_hosts(corpus: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run.json", corpus, training={"train_iters": 1_000_000})
    hosts, ssh = tmp_path / "hosts", tmp_path / "ssh"
    hosts.write_text("one slots=1\nother slots=1\n")
    ssh.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    ssh.chmod(0o755)
    env = {"FAULT": "kill:1:4", "DEAF": "", "MASTER_ADDR": "127.0.0.1"}
    names = [word for name in (*env, MARK) for word in ("--env", name)]
    command = [sys.executable, str(ROOT / "launch/hosts.py"), "--hostfile", str(hosts), *names]
    command += ["--ssh-command", str(ssh), "--module", "tests.distributed.faulty"]
    command += arguments(config, tmp_path, *layout(1, 2))
    with started(command, {**env, "PYTHONPATH": str(ROOT)}) as job:
        code, out, err = job.finish()
        job.wait_until_empty(30)
    assert code == 137 and "other: rank 1 ended with signal SIGKILL" in err
    assert "one | ranks 0 to 0 of 2" in out
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["rank"]) == ("failed", 1), status
    assert len(rows(tmp_path)) == 3
