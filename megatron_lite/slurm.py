"""What a Slurm batch script asks around its `srun`: before it, whether one more start makes sense;
after it, whether the job is to be queued again. No torch; launch/train.sbatch calls it.

`python -m megatron_lite.slurm begin CONFIG …` and `… end CODE CONFIG …`, with CODE that of srun (or
`time-limit`, where that ended it) and then the arguments of megatron_lite.train. Exit codes are
those of megatron_lite.train, AGAIN (the script then queues its job again) and ONCE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import LoadedConfig, load_config
from megatron_lite.json_lines import rows_of
from megatron_lite.outcome import Outcome
from megatron_lite.train import DONE, FAILED, REFUSED, REQUEUE, parse

RESTARTS = "restarts.jsonl"
FRUITLESS = 2
"""Starts in a row without a new checkpoint after which a job is not started again."""
AGAIN = 75
"""Exit code by which the job is to be queued again."""
ONCE = 76
"""Exit code by which the job may run, but Slurm is not to queue it again when a node fails."""
TIME_LIMIT = "time-limit"
_BY_SIGNAL = ("137", "143")
"""srun's code where SIGKILL or SIGTERM ended a task."""
_NOT_ITS_FAULT = ("ended without a word", "stopped by SIGTERM")
"""In the error of a rank that did not fail by itself (see ending.py). Slurm sends SIGTERM to the
ranks of a job that is to make room for another one; of one that is cancelled nobody asks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two commands; returns the exit code for the batch script."""
    # Slurm's notice of the time limit goes to all that run in the job.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    command, *rest = sys.argv[1:] if argv is None else argv
    code = rest.pop(0) if command == "end" else ""
    args = parse(rest)
    try:
        loaded = load_config(args.config, args.set, None, check_files=False)
        if command == "begin":
            return begin(loaded, args.run_dir, os.environ)
        return end(code, loaded, args.run_dir)
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
    except OSError as error:  # of a full disk Python does not tell the file
        print(f"run folder {args.run_dir}: {error}", file=sys.stderr)
    return REFUSED


def begin(loaded: LoadedConfig, run_dir: Path, env: Mapping[str, str]) -> int:
    """Take note of this start; ONCE where launch.requeue is off, FAILED where the job goes round in
    circles."""
    restart = int(env.get("SLURM_RESTART_COUNT", 0))
    now = {
        "job": env.get("SLURM_JOB_ID", ""),
        "restart": restart,
        "step": _saved_step(loaded, run_dir),
        "time": time.time(),
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    Outcome(run_dir, rank=0).forget()
    before = _noted(run_dir / RESTARTS, now)
    print(
        f" start {restart + 1} of job {now['job']} | saved so far: step {now['step']} |", flush=True
    )
    same = [row for row in before if row["job"] == now["job"]][-FRUITLESS:]
    if _made_room(env.get("EARLIER_STARTS", "")):
        same = []
    if len(same) == FRUITLESS and all(row["step"] == now["step"] for row in same):
        error = (
            f"{FRUITLESS} restarts in a row brought no new checkpoint (still step {now['step']}): "
            "not started again; see what ended the job, and whether save_interval is too long for "
            "its time limit"
        )
        Outcome(run_dir, rank=0).write("failed", error=error)
        print(error, file=sys.stderr)
        return FAILED
    return DONE if loaded.config.launch.requeue else ONCE


def _made_room(states: str) -> bool:
    """Whether one of the starts that would count was broken off for another job, by the states that
    sacct tells of a job's starts, the present one last; "" where it can't."""
    ended = [line for line in states.splitlines() if line not in ("RUNNING", "PENDING")]
    return "PREEMPTED" in ended[-FRUITLESS:]


def _noted(log: Path, now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Add a line to the starts of the run; returns those before it."""
    text = log.read_text() if log.exists() else ""
    whole = text[: text.rfind("\n") + 1]  # a node that failed may have left half a line
    with log.open("a") as file:
        file.write(("" if whole == text else "\n") + json.dumps(now) + "\n")
    return list(rows_of(whole))


def end(ended: str, loaded: LoadedConfig, run_dir: Path) -> int:
    """AGAIN where the job is to be queued again, else its exit code; `ended` is srun's code or
    TIME_LIMIT."""
    status = Outcome(run_dir, rank=0).read()
    state, code = status.get("state"), FAILED if ended == TIME_LIMIT else int(ended)
    if state == "done" and ended in ("0", TIME_LIMIT):
        return DONE
    if state == "refused" and not status.get("unmet"):
        return REFUSED
    why = _why_again(ended, status)
    if why is None:
        return code or FAILED
    if not loaded.config.launch.requeue:
        print(f" {why} | launch.requeue would queue the job again |", flush=True)
        return REQUEUE if state == "requeue" else code or FAILED
    print(f" {why} | queued again |", flush=True)
    return AGAIN


def _why_again(code: str, status: Mapping[str, Any]) -> str | None:
    """What ended the run from outside; None where it failed by itself and would again."""
    state = status.get("state")
    if state == "requeue":
        return f"left at iteration {status.get('iteration')}: {status.get('reason')}"
    if code == TIME_LIMIT:
        return "the time limit came before the run had left"
    early = state is None and code in _BY_SIGNAL  # before it had told anything
    outside = any(sign in str(status.get("error")) for sign in _NOT_ITS_FAULT)
    if early or state == "running" or outside:
        return f"killed (srun gave {code})"
    if status.get("hung"):  # a node or the network, mostly; the rule for restarts in vain holds
        return f"hung: {status.get('error')}"
    if status.get("unmet"):
        return f"the ranks did not meet: {status.get('error')}"
    if status.get("lost_peer"):
        return f"a rank is gone: {status.get('error')}"
    return None


def _saved_step(loaded: LoadedConfig, run_dir: Path) -> int:
    """The newest checkpoint's; 0 where there is none."""
    save = loaded.config.checkpoint.save
    there = store.steps(run_dir / save) if save is not None else []
    return there[-1] if there else 0


if __name__ == "__main__":
    sys.exit(main())
