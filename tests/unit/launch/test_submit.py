"""What submit.py hands to sbatch: nodes, options, the environment to the byte, copies of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ODD = {
    "BRACKETS": "64(x2)",
    "SPACES": "two words",
    "DOLLAR": "$HOME/x:$PATH",
    "QUOTES": "a'b\"c",
    "SEMICOLON": "a; touch evil",
    "EQUALS": "a=b=c",
    "EMPTY": "",
}


@pytest.fixture
def config(small_run: dict[str, Any], tmp_path: Path) -> Path:
    """A run on two nodes with four ranks each."""
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").touch()
    run = small_run | {
        "data": small_run["data"] | {"data_path": "corpus"},
        "launch": {"nodes": 2, "gpus_per_node": 4, "time": "0:30:00"},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    return file


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with an sbatch that only tells what it was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"log = open({str(tmp_path / 'calls')!r}, 'a')\n"
        "log.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')\n"
        "print(str(100 + log.tell() % 7) + ';cluster')\n"
    )
    program.chmod(0o755)
    return folder


def submit(fake: Path, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{fake}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, ROOT / "launch/submit.py", *map(str, args)],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **env},
        cwd=fake.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def calls(fake: Path) -> list[tuple[list[str], dict[str, str]]]:
    return [json.loads(line) for line in (fake.parent / "calls").read_text().splitlines()]


def options(script: str) -> list[str]:
    lines = script.splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_b50_a_job_gets_everything(config: Path, fake: Path) -> None:
    site = config.with_name("site.env")
    lines = [f"{name}={value}" for name, value in ODD.items()]
    site.write_text("\n".join(["# facts", "", "SBATCH_QOS=high", "GPUS_PER_NODE=4", *lines]) + "\n")
    run_dir = config.parent / "here"
    values = ["optimizer.lr=0.5", "launch.partition=long", "launch.account=team"]
    sets = [word for value in [*values, "launch.job_name=big"] for word in ("--set", value)]
    done = submit(fake, config, "--run-dir", run_dir, "--site", site, *sets)
    assert done.returncode == 0, done.stderr
    assert options((run_dir / "train.sbatch").read_text()) == [
        "--job-name=big",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--partition=long",
        "--account=team",
        "--time=0:30:00",
        f'--output="{run_dir}/%x-%j.out"',
        "--open-mode=append",
        "--signal=USR1@120",
        "--no-requeue",
    ]
    ((words, env),) = calls(fake)
    assert words[:2] == ["--parsable", f"--chdir={config.parent}"]
    assert words[2:] == [
        str(run_dir / "train.sbatch"), str(run_dir / "submitted.json"), "--run-dir", str(run_dir)
    ]  # fmt: skip
    assert {name: env[name] for name in ODD} == ODD and env["SBATCH_QOS"] == "high"
    assert env["PYTHONPATH"] == f"{run_dir / 'code'}{os.pathsep}{ROOT}", "the user's is kept"
    assert not (config.parent / "evil").exists()
    assert json.loads((run_dir / "submitted.json").read_text())["optimizer"]["lr"] == 0.5
    here, there = (r / "megatron_lite/train.py" for r in (ROOT, run_dir / "code"))
    assert here.read_bytes() == there.read_bytes()
    job = done.stdout.split("job          ")[1].split()[0]
    assert f"{run_dir}/big-{job}.out" in done.stdout and f"--logdir {run_dir}" in done.stdout


def test_nodes_follow_from_ranks_and_gpus_of_a_node(config: Path, fake: Path) -> None:
    site = config.with_name("site.env")
    for gpus, shape in (("8", (1, 8)), ("2", (4, 2)), ("16", (1, 8))):
        site.write_text(f"GPUS_PER_NODE={gpus}\n")
        done = submit(fake, config, "--run-dir", config.parent / gpus, "--site", site, "--dry-run")
        assert done.returncode == 0, done.stderr
        nodes, tasks = options(done.stdout)[1:3]
        assert (nodes, tasks) == (f"--nodes={shape[0]}", f"--ntasks-per-node={shape[1]}")
        assert not (config.parent / gpus).exists(), "a dry run writes nothing"
    assert not (config.parent / "calls").exists(), "and submits nothing"


def test_the_sites_pythonpath_is_kept(config: Path, fake: Path) -> None:
    site = config.with_name("site.env")
    site.write_text("PYTHONPATH=/opt/lib\n")
    assert submit(fake, config, "--run-dir", config.parent / "here", "--site", site).returncode == 0
    ((_, env),) = calls(fake)
    assert env["PYTHONPATH"] == f"{config.parent / 'here/code'}{os.pathsep}/opt/lib"


def test_a_chain_waits_for_the_job_before(config: Path, fake: Path) -> None:
    done = submit(fake, config, "--chain", 3, "--dependency", "afterok:5")
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("job ")]
    waits = [next(w for w in words if "--dependency" in w) for words, _ in calls(fake)]
    expected = ["afterok:5", *(f"afterany:{job}" for job in jobs[:-1])]
    assert waits == [f"--dependency={what}" for what in expected] and len(jobs) == 3


def test_the_lead_follows_from_what_was_measured(config: Path, fake: Path) -> None:
    run_dir = config.parent / "here"
    run_dir.mkdir()
    rows = [{"event": "train", "elapsed_ms_per_iteration": ms} for ms in (900, 20_000, 1000)]
    rows += [{"event": "save", "elapsed_ms": 100_000}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text + '{"event": "tra')  # the run was killed there
    done = submit(fake, config, "--run-dir", run_dir, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--signal=USR1@270" in options(done.stdout)


@pytest.mark.parametrize(
    ("site", "told"),
    [
        ("A=1\nnonsense\n", "site.env: line 2: 'nonsense' is not NAME=value"),
        ("A=1\nA=2\n", "line 2: A is given twice"),
        ("GPUS_PER_NODE=x\n", "GPUS_PER_NODE=x: must be a whole number"),
        ("GPUS_PER_NODE=3\n", "8 ranks can't be spread evenly over nodes of 3 GPUs"),
    ],
)
def test_a_faulty_site_is_refused(site: str, told: str, config: Path, fake: Path) -> None:
    path = config.with_name("site.env")
    path.write_text(site)
    done = submit(fake, config, "--site", path)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert not (fake.parent / "calls").exists()


def test_a_faulty_config_is_refused_before_anything_is_written(config: Path, fake: Path) -> None:
    done = submit(fake, config, "--set", "model.num_layers=0")
    assert done.returncode == 2 and "model.num_layers" in done.stderr
    assert not (config.parent / "runs").exists() and not (fake.parent / "calls").exists()
