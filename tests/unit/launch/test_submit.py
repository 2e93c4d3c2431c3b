"""What submit.py hands to sbatch: nodes, options, the environment to the byte, copies of all."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.submissions import alone

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
    """A run on two nodes with four ranks each, that can go on from what it saved."""
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").touch()
    run = small_run | {
        "data": small_run["data"] | {"data_path": "corpus"},
        "launch": {"nodes": 2, "gpus_per_node": 4, "time": "0:30:00"},
        "checkpoint": {"save": "c", "load": "c", "exit_on_missing_checkpoint": False},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    return file


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder of commands: an sbatch that only tells what it was given and gives numbers from 101
    on, a queue that is a file, and others that do nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    sbatch = (
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"log = open({str(tmp_path / 'calls')!r}, 'a+')\n"
        "log.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')\n"
        "log.seek(0)\n"
        "print(f'{100 + len(log.readlines())};cluster')\n"
    )
    squeue = f"#!/bin/sh\ncat {tmp_path}/queue\n"
    programs = {
        "sbatch": sbatch,
        "squeue": squeue,
        "srun": "#!/bin/sh\n",
        "scontrol": "#!/bin/sh\n",
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def submit(
    fake: Path, *args: object, program: Path = ROOT / "launch/submit.py", **env: str
) -> subprocess.CompletedProcess[str]:
    path = f"{fake}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, program, *map(str, args)],
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
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def test_b50_a_job_gets_everything(config: Path, fake: Path) -> None:
    site = config.with_name("site.env")
    lines = [f"{name}={value}" for name, value in ODD.items()]
    site.write_text("\n".join(["# facts", "", "SBATCH_QOS=high", "GPUS_PER_NODE=4", *lines]) + "\n")
    run_dir = config.parent / "here"
    values = ["optimizer.lr=0.5", "launch.partition=long", "launch.account=team"]
    values += ["launch.job_name=big", "launch.cpus_per_task=8"]
    sets = [word for value in values for word in ("--set", value)]
    stale = {"SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_END_TIME": "1"}  # of salloc's shell
    done = submit(fake, config, "--run-dir", run_dir, "--site", site, *sets, **stale)
    assert done.returncode == 0, done.stderr
    folder = run_dir / "submissions/1"
    given = [
        "--job-name=big",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--partition=long",
        "--account=team",
        "--time=0:30:00",
        f"--output={run_dir}/%x-%j.out",
        "--open-mode=append",
        "--signal=USR1@120",
        "--no-requeue",
        "--export=ALL",
    ]
    assert options((folder / "train.sbatch").read_text()) == given
    ((words, env),) = calls(fake)
    assert words[:2] == ["--parsable", f"--chdir={config.parent}"]
    assert words[2:-4] == given, "SBATCH_ variables beat what a script says, not the command line"
    assert words[-4:] == [
        str(folder / "train.sbatch"), str(folder / "config.json"), "--run-dir", str(run_dir)
    ]  # fmt: skip
    assert {name: env[name] for name in ODD} == ODD and env["SBATCH_QOS"] == "high"
    assert not stale.keys() & env.keys()
    assert env["PYTHONPATH"] == f"{folder / 'code'}{os.pathsep}{ROOT}", "the user's is kept"
    assert not (config.parent / "evil").exists()
    assert json.loads((folder / "config.json").read_text())["optimizer"]["lr"] == 0.5
    here, there = (r / "megatron_lite/train.py" for r in (ROOT, folder / "code"))
    assert here.read_bytes() == there.read_bytes()
    job = done.stdout.split("job          ")[1].split()[0]
    assert f"{run_dir}/big-{job}.out" in done.stdout and f"--logdir {run_dir}" in done.stdout


def test_the_copy_is_what_runs(config: Path, fake: Path) -> None:
    """In a folder that has the code as well, such as this repository."""
    run_dir = config.parent / "here"
    assert submit(fake, config, "--run-dir", run_dir).returncode == 0
    package = run_dir / "submissions/1/code/megatron_lite/__init__.py"
    package.write_text(package.read_text() + "print('the copy')\n")
    ((words, env),) = calls(fake)
    done = subprocess.run(
        ["bash", *words[-4:]],
        env=env | {"SLURM_JOB_ID": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.count("the copy") == 2, f"before and after srun: {done}"


def test_a_copy_can_be_submitted_from(config: Path, fake: Path) -> None:
    run_dir = config.parent / "here"
    assert submit(fake, config, "--run-dir", run_dir).returncode == 0
    (fake.parent / "queue").touch()
    first, second = (run_dir / "submissions" / number for number in "12")
    program = first / "code/launch/submit.py"
    done = submit(fake, first / "config.json", "--run-dir", run_dir, program=program)
    assert done.returncode == 0, done.stderr
    for name in ("launch/submit.py", "launch/train.sbatch", "megatron_lite/train.py"):
        assert (first / "code" / name).read_bytes() == (second / "code" / name).read_bytes()
    assert (first / "jobs").read_text().split() and (second / "jobs").read_text().split()


def test_a_run_folder_takes_no_second_job_at_once(config: Path, fake: Path) -> None:
    submissions = config.parent / "runs/run/submissions"
    assert submit(fake, config, "--chain", 2).returncode == 0
    (config.parent / "queue").write_text("CLUSTER: cluster\n7 a\n102 b\n")
    done = submit(fake, config)
    assert (
        done.returncode == 2
        and "cancel (scancel --clusters=cluster 102), wait (--dep" in done.stderr
    )
    assert len(calls(fake)) == 2 and {path.name for path in submissions.iterdir()} == {"1", "lock"}
    words = ("--dependency", "afterany:102")
    done = submit(fake, config, *words, "--set", "checkpoint.load=null")
    assert done.returncode == 2 and "checkpoint.load = null" in done.stderr
    done = submit(fake, config, *words)
    assert done.returncode == 0, done.stderr
    assert (submissions / "2/jobs").read_text() == "103;cluster\n", "with a copy of its own"
    *_, (_, env) = calls(fake)
    assert env["SBATCH_CLUSTERS"] == "cluster", "no job can wait for one of another"


def test_a_chain_has_to_go_on_from_what_was_saved(config: Path, fake: Path) -> None:
    done = submit(fake, config, "--chain", 2, "--set", "checkpoint.load=null")
    assert done.returncode == 2
    assert "checkpoint.load = null: must be what --chain would go on from" in done.stderr
    assert done.stderr.rstrip().endswith("[--set]"), "where it was written"
    assert not (config.parent / "calls").exists() and not (config.parent / "runs").exists()


def test_nodes_follow_from_ranks_and_gpus_of_a_node(config: Path, fake: Path) -> None:
    site = config.with_name("site.env")
    for gpus, shape in (("8", (1, 8)), ("2", (4, 2)), ("16 a node", (1, 8))):
        site.write_text(f"GPUS_PER_NODE={gpus.split()[0]}\n")
        done = submit(fake, config, "--run-dir", config.parent / gpus, "--site", site, "--dry-run")
        assert done.returncode == 0, done.stderr
        nodes, tasks = options(done.stdout)[1:3]
        assert (nodes, tasks) == (f"--nodes={shape[0]}", f"--ntasks-per-node={shape[1]}")
        assert not (config.parent / gpus).exists(), "a dry run writes nothing"
        command = shlex.split(done.stdout.splitlines()[-1])
        assert command[0] == "sbatch" and command[-1] == str(config.parent / gpus)
    assert not (config.parent / "calls").exists(), "and submits nothing"


def test_the_sites_pythonpath_is_kept(config: Path, fake: Path) -> None:
    site = config.with_name("site.env")
    site.write_text("PYTHONPATH=/opt/lib\n")
    assert submit(fake, config, "--run-dir", config.parent / "here", "--site", site).returncode == 0
    ((_, env),) = calls(fake)
    assert env["PYTHONPATH"] == f"{config.parent / 'here/submissions/1/code'}{os.pathsep}/opt/lib"


def test_a_chain_waits_for_all_jobs_before(config: Path, fake: Path) -> None:
    """One of them may be cancelled before it has begun."""
    done = submit(fake, config, "--chain", 3, "--dependency", "afterok:5")
    assert done.returncode == 0, done.stderr
    jobs = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("job ")]
    waits = [next(w for w in words if "--dependency" in w) for words, _ in calls(fake)]
    expected = ["afterok:5", f"afterany:{jobs[0]}", f"afterany:{jobs[0]}:{jobs[1]}"]
    assert waits == [f"--dependency={what}" for what in expected] and len(jobs) == 3


@pytest.mark.parametrize(
    ("site", "told"),
    [
        ("A=1\nnonsense\n", "site.env: line 2: 'nonsense' is not NAME=value"),
        ("A=1\nA=2\n", "line 2: A is given twice"),
        ("A=caf\udce9\n", "site.env: can't be read ('utf-8' codec"),
        ("GPUS_PER_NODE=x\n", "GPUS_PER_NODE=x: must be a whole number"),
        ("GPUS_PER_NODE=3\n", "8 ranks can't be spread evenly over nodes of 3 GPUs"),
    ],
)
def test_a_faulty_site_is_refused(site: str, told: str, config: Path, fake: Path) -> None:
    path = config.with_name("site.env")
    path.write_text(site, errors="surrogateescape")
    done = submit(fake, config, "--site", path)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert not (fake.parent / "calls").exists()


def test_a_faulty_config_is_refused_before_anything_is_written(config: Path, fake: Path) -> None:
    done = submit(fake, config, "--set", "model.num_layers=0")
    assert done.returncode == 2 and "model.num_layers" in done.stderr
    assert not (config.parent / "runs").exists() and not (fake.parent / "calls").exists()


def test_what_sbatch_says_is_no_surprise(config: Path, fake: Path) -> None:
    """Two at once, no Slurm, an answer that got lost: nothing is lost, and the folder is known."""
    run_dir = config.parent / "here"
    with alone(run_dir):
        done = submit(fake, config, "--run-dir", run_dir)
    assert done.returncode == 2 and "another submission into it is under way" in done.stderr
    lost = f'echo "7 {run_dir}/submissions/1/train.sbatch" >{fake.parent}/queue'
    timed_out = "echo Socket timed out on send/recv operation >&2; exit 1"
    (fake / "sbatch").write_text(f"#!/bin/sh\n{lost}\n{timed_out}\n")
    done = submit(fake, config, "--run-dir", run_dir)
    assert done.returncode == 2 and "gave no job: Socket timed out on send/recv" in done.stderr
    assert "may be there nevertheless" in done.stderr and "job  " not in done.stdout
    done = submit(fake, config, "--run-dir", run_dir)
    assert done.returncode == 2 and "still waiting or running: job 7; cancel" in done.stderr
    (fake / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error: timed out >&2; exit 1\n")
    done = submit(fake, config, "--run-dir", run_dir)
    assert done.returncode == 2 and "squeue can't tell whether jobs of" in done.stderr
    (fake / "sbatch").unlink()
    done = submit(fake, config, PATH=str(fake))
    assert done.returncode == 2 and "sbatch: not found on the PATH; submit on" in done.stderr
    assert not (config.parent / "runs").exists()
    assert "Traceback" not in done.stderr


def test_a_job_that_can_not_be_noted_is_told(config: Path, fake: Path) -> None:
    """As on a disk that is full by then."""
    folder = config.parent / "here/submissions/1"
    (fake / "sbatch").write_text(f"#!/bin/sh\nmkdir {folder}/jobs; echo loud; echo '5;east'\n")
    done = submit(fake, config, "--run-dir", folder.parents[1])
    assert done.returncode == 2 and "job          5 on cluster east\n" in done.stdout
    assert f"job 5 on cluster east is submitted, but {folder} can't keep that" in done.stderr
    (fake / "sbatch").write_text("#!/bin/sh\necho a fine day\n")
    done = submit(fake, config, "--run-dir", config.parent / "there")
    assert done.returncode == 2 and "sbatch printed no job's number: 'a fine day'" in done.stderr


def test_a_folder_that_can_not_be_written_is_told(config: Path, fake: Path) -> None:
    """A full disk is pretended by a limit on the size of files."""
    run_dir = config.parent / "a run"
    words = [sys.executable, str(ROOT / "launch/submit.py"), str(config), "--run-dir"]
    for limit in ("100", "12000"):  # for the config, or for some of the code
        done = subprocess.run(
            ["prlimit", f"--fsize={limit}", *words, str(run_dir)],
            env={**os.environ, "PATH": f"{fake}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2 and done.stderr.startswith(f"{run_dir}/submissions/1: can't be")
        assert "File too large" in done.stderr and done.stderr.count("\n") == 1
        assert [path.name for path in run_dir.glob("*/*")] == ["lock"]
    done = submit(fake, config, "--run-dir", config / "run")
    assert done.returncode == 2 and "run: can't be written (Not a directory)" in done.stderr
