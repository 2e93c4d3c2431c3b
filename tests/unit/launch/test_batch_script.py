"""launch/train.sbatch and local.sh with pretended commands: what they call, and exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder of commands that note how they were called and answer as their variables say."""
    for name in ("module", "srun", "scontrol", "sacct", "python", "sleep", "nvidia-smi"):
        program = tmp_path / name
        variable = name.upper().replace("-", "_")
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" | tr "\\n" " " >>{tmp_path}/calls\n'
            f"echo >>{tmp_path}/calls\n"
            f'printf "%s" "${{{variable}_SAYS:-}}"\nexit ${{{variable}_CODE:-0}}\n'
        )
        program.chmod(0o755)
    return tmp_path


def run(fake: Path, script: str, **env: str) -> tuple[int, list[str], str]:
    """Exit code, the calls in their order, and what went to stderr."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    path = f"{fake}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ROOT / "launch" / script, "run.json"],
        env={**kept, "PATH": path, "PYTHON": "python", "SLURM_JOB_ID": "12"} | env,
        cwd=fake,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    calls = fake / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    told = [re.sub(r"sh -c env --block-signal.* rank ", "BLOCKED ", line.strip()) for line in lines]
    return done.returncode, told, done.stderr


TRAIN = "BLOCKED python -m megatron_lite.train run.json"
TIME = "scontrol show job 12"


def test_a_plain_job(fake: Path) -> None:
    code, calls, _ = run(fake, "train.sbatch", SRUN_CODE="9")
    assert code == 0, "what the last command says"
    assert calls == [
        "python -m megatron_lite.slurm begin run.json",
        TIME,
        f"srun --kill-on-bad-exit=1 --export=ALL {TRAIN}",
        "python -m megatron_lite.slurm end 9 run.json",
    ]


def test_modules_containers_and_options_of_srun(fake: Path) -> None:
    site = {
        "MODULES": "cuda/12.8 python",
        "CONTAINER": "env -u NONE * --",
        "SRUN_OPTIONS": "--container-image=/images/a.sqsh --container-mounts=/data",
    }
    code, calls, _ = run(fake, "train.sbatch", **site)
    inside = f"{site['SRUN_OPTIONS']} {site['CONTAINER']}"
    step = f"srun --nodes=1 --ntasks=1 --export=ALL {inside}"
    assert code == 0 and calls == [
        "module load cuda/12.8 python",
        f"{step} BLOCKED python -m megatron_lite.slurm begin run.json",
        TIME,
        f"srun --kill-on-bad-exit=1 --export=ALL {inside} {TRAIN}",
        f"{step} BLOCKED python -m megatron_lite.slurm end 0 run.json",
    ]


def test_srun_is_told_how_many_cores_a_rank_has(fake: Path) -> None:
    """It does not look at what the batch job has."""
    (fake / "srun").write_text(f'#!/bin/sh\necho "${{SRUN_CPUS_PER_TASK-none}}" >>{fake}/cores\n')
    run(fake, "train.sbatch")
    run(fake, "train.sbatch", SLURM_CPUS_PER_TASK="7")
    assert (fake / "cores").read_text().split() == ["none", "7"]


@pytest.mark.parametrize(
    ("faults", "code", "last"),
    [
        ({"MODULES": "x", "MODULE_CODE": "1"}, 2, "module load x"),
        ({"PYTHON_CODE": "2"}, 2, "python -m megatron_lite.slurm begin run.json"),
    ],
)
def test_a_start_that_makes_no_sense(
    faults: dict[str, str], code: int, last: str, fake: Path
) -> None:
    found, calls, _ = run(fake, "train.sbatch", **faults)
    assert found == code and calls[-1] == last


def test_a_job_queues_itself_again(fake: Path) -> None:
    """A Python that is content before the run and says 75 after it."""
    (fake / "python").write_text('#!/bin/sh\n[ "$3" = end ] && exit 75\nexit 0\n')
    for says in ("JobState=RUNNING Reason=None", "JobState=COMPLETING Reason=TimeLimit"):
        code, calls, _ = run(fake, "train.sbatch", SCONTROL_SAYS=says)
        assert code == 0 and calls[-3:] == [TIME, "scontrol requeue 12", "sleep 60"]
    code, calls, told = run(fake, "train.sbatch", SCONTROL_SAYS="JobState=COMPLETING Reason=None")
    assert code == 3 and calls[-1] == TIME and not told, "somebody cancelled it meanwhile"


@pytest.mark.parametrize(
    ("silent", "last"),
    [
        ("[124]", "sleep 60"),  # of its calls, which begin with the times of the job
        ("[1-6]", TIME),
        ("[345]", "scontrol requeue 12"),
    ],
)
def test_a_busy_controller_is_asked_again(silent: str, last: str, fake: Path) -> None:
    """Twice; a job that is not queued again says so."""
    (fake / "python").write_text('#!/bin/sh\n[ "$3" = end ] && exit 75\nexit 0\n')
    lines = (
        "#!/bin/sh",
        f'echo "scontrol $*" >>{fake}/calls',
        f"case $(grep -c ^scontrol {fake}/calls) in {silent}) exit 1;; esac",
        "echo JobState=RUNNING",
    )
    (fake / "scontrol").write_text("\n".join(lines))
    code, calls, told = run(fake, "train.sbatch")
    assert calls[-1] == last and (code == 0) is (last == "sleep 60")
    assert ("not queued again: submit it once more" in told) is (code == 3)


def test_a_notice_to_the_script_alone_reaches_the_run(fake: Path) -> None:
    """As --signal=B:USR1 sends it, at whatever time."""
    (fake / "python").write_text(f'#!/bin/sh\nkill -USR1 $PPID; echo "$4" >>{fake}/calls\n')
    heed = f'trap "echo heard >>{fake}/calls; exit 3" USR1'
    (fake / "srun").write_text(
        f"#!/bin/sh\n{heed}\nwhile :; do kill -USR1 $PPID; /bin/sleep 0.1; done\n"
    )
    code, calls, _ = run(fake, "train.sbatch")
    assert code == 0 and calls == ["run.json", TIME, "heard", "3"]


def test_a_restart_is_told_how_earlier_starts_ended(fake: Path) -> None:
    (fake / "python").write_text(f'#!/bin/sh\necho "${{EARLIER_STARTS-none}}" >>{fake}/told\n')
    for count in ("1", "2"):
        run(fake, "train.sbatch", SLURM_RESTART_COUNT=count, SACCT_SAYS="PREEMPTED\nRUNNING")
    after = "PREEMPTED\nRUNNING\n" * 2
    assert (fake / "told").read_text() == "none\nnone\n" + after


def test_a_task_of_an_array_is_called_by_its_own_name(fake: Path) -> None:
    (fake / "python").write_text('#!/bin/sh\n[ "$3" = end ] && exit 75\nexit 0\n')
    env = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "5"}
    _, calls, _ = run(fake, "train.sbatch", SCONTROL_SAYS="JobState=RUNNING", **env)
    asked = [call for call in calls if call.startswith("scontrol")]
    assert asked == ["scontrol show job 12_5"] * 2 + ["scontrol requeue 12_5"]


@pytest.mark.parametrize(("begun", "code"), [(0, 0), (76, 1)])
def test_steps_in_a_container_can_be_queued_again_at_the_limit(
    begun: int, code: int, fake: Path
) -> None:
    """No step begins any more then, and so none that asks how the run has ended."""
    slurm = f'case "$*" in *"slurm begin"*) exit {begun};; *) kill -TERM $PPID; exit 1;; esac'
    (fake / "srun").write_text(f"#!/bin/sh\n{slurm}\n")
    env = {"SRUN_OPTIONS": "--container-image=x", "SCONTROL_SAYS": "Reason=TimeLimit"}
    found, calls, _ = run(fake, "train.sbatch", **env)
    assert found == code and ("scontrol requeue 12" in calls) == (begun == 0)


def test_a_job_that_is_not_to_be_queued_again_says_so_to_slurm(fake: Path) -> None:
    (fake / "python").write_text('#!/bin/sh\n[ "$3" = begin ] && exit 76\nexit 0\n')
    code, calls, _ = run(fake, "train.sbatch")
    assert code == 0 and calls[0] == "scontrol update JobId=12 Requeue=0"


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("   StartTime=2026-11-30T10:00:00 EndTime=2026-11-30T12:00:00 Deadline=N/A", "1796040000"),
        ("   StartTime=2026-11-30T10:00:00 EndTime=Unknown Deadline=N/A", ""),
        ("", ""),
    ],
)
def test_the_ranks_are_told_when_their_time_ends(says: str, told: str, fake: Path) -> None:
    """And never the end of the job in whose shell this one was submitted."""
    (fake / "srun").write_text(f'#!/bin/sh\necho "ends $SLURM_JOB_END_TIME" >>{fake}/calls\n')
    env = {"SCONTROL_SAYS": says, "SLURM_JOB_END_TIME": "1", "TZ": "UTC"}
    _, calls, _ = run(fake, "train.sbatch", **env)
    assert calls[2] == f"ends {told}".strip()


def test_what_follows_the_run_is_done_at_the_end_of_the_time(fake: Path) -> None:
    """The signals of the limit go to the commands of the script as well."""
    python = '[ "$3" = end ] || exit 0; kill -TERM $PPID; kill -USR1 $PPID; kill -TERM $$; exit 75'
    (fake / "python").write_text(f"#!/bin/sh\n{python}\n")
    code, calls, _ = run(fake, "train.sbatch", SCONTROL_SAYS="Reason=TimeLimit")
    assert code == 0 and calls[-2:] == ["scontrol requeue 12", "sleep 60"]


MASK = "import signal as s; print(s.SIGUSR1 in s.pthread_sigmask(s.SIG_BLOCK, []))"


@pytest.mark.parametrize("script", ["train.sbatch", "local.sh"])
@pytest.mark.parametrize("is_old", [False, True])
def test_the_notice_waits_until_python_can_take_it(
    script: str, is_old: bool, tmp_path: Path
) -> None:
    """With an env that can't block signals, too, as far as a script can."""
    if is_old:
        (tmp_path / "env").write_text("#!/bin/sh\nexit 125\n")
        (tmp_path / "env").chmod(0o755)
    text = (ROOT / "launch" / script).read_text()
    words = re.search(r"blocked='(.*?)'\n", text, re.DOTALL)
    assert words is not None
    done = subprocess.run(
        ["sh", "-c", words[1], "rank", sys.executable, "-c", MASK],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == "True"


RANKS = "// DeepSpeed, derived for {} ranks (data parallel 1):\n"


@pytest.mark.parametrize(
    ("env", "last"),
    [
        ({}, "python -m torch.distributed.run --standalone --nproc_per_node 4 -m TRAIN"),
        ({"PYTHON_SAYS": RANKS.format(1)}, "python -m TRAIN"),
        (
            {"SLURM_JOB_ID": "12"},
            "srun --ntasks=4 --kill-on-bad-exit=1 --export=ALL BLOCKED python -m TRAIN",
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "4294967290"},  # salloc's shell
            "srun --ntasks=4 --kill-on-bad-exit=1 --export=ALL BLOCKED python -m TRAIN",
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"},
            "python -m torch.distributed.run --standalone --nproc_per_node 4 -m TRAIN",
        ),
    ],
)
def test_local_takes_what_the_machine_has(env: dict[str, str], last: str, fake: Path) -> None:
    given = {"PYTHON_SAYS": RANKS.format(4), "SLURM_JOB_ID": "", "CUDA_VISIBLE_DEVICES": ""} | env
    code, calls, _ = run(fake, "local.sh", **given)
    assert code == 0
    assert calls == [
        "python -m megatron_lite.train run.json --validate-only",
        last.replace("TRAIN", "megatron_lite.train run.json"),
    ]


@pytest.mark.parametrize(("devices", "code"), [(None, 2), ("0,1", 2), ("0,1,2,3", 0), ("", 0)])
def test_local_refuses_more_ranks_than_gpus(devices: str | None, code: int, fake: Path) -> None:
    env = {"PYTHON_SAYS": RANKS.format(4), "SLURM_JOB_ID": "", "NVIDIA_SMI_SAYS": "GPU 0\nGPU 1\n"}
    env |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    found, _, err = run(fake, "local.sh", **env)
    assert found == code
    assert ("4 ranks, but this machine has 2 GPUs" in err) == bool(code)
