"""launch/hosts.py with `sh -c` for ssh: what arrives on a host, and how a job of several ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ODD = {
    "BRACKETS": "64(x2)",
    "SPACES": "two  words ",
    "DOLLAR": "$HOME/x:$PATH",
    "QUOTES": "a'b\"c`touch evil`",
    "SEMICOLON": "a; touch evil",
    "NEWLINE": "a\ntouch evil\n",
    "EQUALS": "a=b=c",
    "EMPTY": "",
    "BYTES": os.fsdecode(b"\xff\xc3\xa9"),
}
RANK = """
import json, os, signal, sys, time
rank = os.environ["RANK"]
deaf = os.environ.get("DEAF") == rank
signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: sys.exit(3))
with open(f"rank-{rank}.json", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ), os.getpid()], file)
end, _, how = os.environ.get("END", "").partition(":")
if end == rank:
    while not all(os.path.exists(f"rank-{r}.json") for r in range(3)):
        time.sleep(0.01)
    os.kill(os.getpid(), 9) if how == "kill" else sys.exit(int(how))
time.sleep(60 if end else 0)
"""


@pytest.fixture
def folder(small_run: dict[str, Any], tmp_path: Path) -> Path:
    """A config for three ranks, a host file, a pretended ssh, and what the ranks run."""
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").touch()
    data = small_run["data"] | {"data_path": "corpus"}
    training = small_run["training"] | {"global_batch_size": 24}
    run = small_run | {"data": data, "training": training, "parallel": {}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "hosts").write_text("me@far slots=2\nnear slots=1\n")
    (tmp_path / "ranks.py").write_text(RANK)
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\nexec env -i PATH="$PATH" sh -c "$2"\n'
    )
    ssh.chmod(0o755)
    return tmp_path


def command(folder: Path, *args: object) -> list[str]:
    words = [sys.executable, ROOT / "launch/hosts.py", "run.json", "--hostfile", folder / "hosts"]
    words += ["--ssh-command", folder / "ssh", "--module", "ranks", *args]
    return [*map(str, words)]


def environment(folder: Path, **extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **extra}


def run(folder: Path, *args: object, **extra: str) -> subprocess.CompletedProcess[str]:
    env = environment(folder, **extra)
    return subprocess.run(
        command(folder, *args), env=env, cwd=folder, capture_output=True, text=True, timeout=60
    )


@contextmanager
def running(folder: Path, names: Sequence[str], **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A job whose three ranks are there."""
    words = command(folder, *(word for name in names for word in ("--env", name)))
    env = environment(folder, **extra)
    process = subprocess.Popen(words, env=env, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while len(list(folder.glob("rank-*.json"))) < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks(folder: Path) -> list[tuple[list[str], dict[str, str], int]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)]


def wait_until_gone(folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for _, _, pid in ranks(folder):
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"{pid} is still there"
            time.sleep(0.05)


def test_b50_every_rank_sees_what_the_launcher_saw(folder: Path) -> None:
    names = [word for name in (*ODD, "SECRET") for word in ("--env", name)]
    sets = ["--set", "optimizer.lr=0.5", "--set", "launch.job_name=$HOME; touch evil"]
    extra = {**ODD, "SECRET": "hush", "OTHER": "kept back"}
    done = run(folder, *names, *sets, **extra)
    assert done.returncode == 0, done.stderr
    found = ranks(folder)
    for rank, (words, env, _) in enumerate(found):
        assert {name: env[name] for name in ODD} == ODD and env["SECRET"] == "hush"
        assert "OTHER" not in env and "USER" not in env
        assert env["PYTHONPATH"] == os.pathsep.join(map(str, (ROOT, ROOT, folder)))
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        assert env["LOCAL_RANK"] == str(rank % 2) and env["MASTER_ADDR"] == "far"
        assert words == ["run.json", "--run-dir", "runs/run", *sets]
    assert len({env["MASTER_PORT"] for _, env, _ in found}) == 1
    assert 10_000 <= int(found[0][1]["MASTER_PORT"]) < 30_000
    assert not list(folder.glob("**/evil"))
    calls = (folder / "calls").read_text()
    assert "hush" not in done.stdout + done.stderr + calls
    assert [line.split()[0] for line in sorted(calls.splitlines())] == ["me@far", "near"]


def test_b46_what_the_user_sets_wins(folder: Path) -> None:
    done = run(folder, MASTER_ADDR="10.0.0.7", MASTER_PORT="4711")
    assert done.returncode == 0, done.stderr
    assert all(env["MASTER_ADDR"] == "10.0.0.7" for _, env, _ in ranks(folder))
    assert all(env["MASTER_PORT"] == "4711" for _, env, _ in ranks(folder))


def test_a_dry_run_starts_nothing_and_shows_no_value(folder: Path) -> None:
    done = run(folder, "--env", "SECRET", "--dry-run", SECRET="hush")
    assert done.returncode == 0, done.stderr
    assert "me@far | ranks 0 to 1 of 3" in done.stdout and "near | ranks 2 to 2" in done.stdout
    assert "SECRET" in done.stdout and "hush" not in done.stdout
    assert not (folder / "calls").exists()


@pytest.mark.parametrize(
    ("hosts", "args", "told"),
    [
        (None, [], "hosts: can't be read as a host file"),
        ("# nobody\n", [], "no host in it"),
        ("far slots=x\n", [], "line 1: 'far slots=x'"),
        ("far slots=5\n", [], "training.global_batch_size"),
        ("far slots=3\n", ["--env", "NOT_THERE"], "--env NOT_THERE: not set here"),
        ("localhost slots=2\nfar slots=1\n", [], "means another machine on each of them"),
    ],
)
def test_b47_faults_are_refused_before_anything_starts(
    hosts: str | None, args: list[str], told: str, folder: Path
) -> None:
    (folder / "hosts").unlink()
    if hosts is not None:
        (folder / "hosts").write_text(hosts)
    done = run(folder, *args)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "calls").exists() and not list(folder.glob("rank-*"))


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("kill", 137, "near: rank 2 ended with signal SIGKILL"),
        ("5", 5, "rank 2 ended with exit code 5"),
    ],
)
def test_b51_one_host_takes_the_others_along(how: str, code: int, told: str, folder: Path) -> None:
    done = run(folder, "--env", "END", END=f"2:{how}")
    assert done.returncode == code and told in done.stderr
    wait_until_gone(folder, 0.5)
    if how == "kill":
        status = json.loads((folder / "runs/run/status.json").read_text())
        assert (status["state"], status["rank"]) == ("failed", 2)


def test_asked_to_leave_all_ranks_leave(folder: Path) -> None:
    with running(folder, ["END"], END="none") as launcher:
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=20) == 3
        wait_until_gone(folder, 1)


def test_b51_a_killed_launcher_takes_its_ranks_along(folder: Path) -> None:
    with running(folder, ["END"], END="none") as launcher:
        launcher.kill()
        wait_until_gone(folder, 20)


@pytest.mark.every
def test_a_second_signal_ends_a_rank_that_hears_none(folder: Path) -> None:
    with running(folder, ["END", "DEAF"], END="none", DEAF="1") as launcher:
        for _ in range(2):
            launcher.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert launcher.wait(timeout=40) not in (0, 3)
        wait_until_gone(folder, 1)
