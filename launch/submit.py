"""Submit a run to Slurm: check its config, leave all it needs in its folder, hand it to sbatch.

The run folder gets a copy of the code, the resolved config and the batch script, so that later
changes here do not reach a job that waits or is queued again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import LoadedConfig, load_config, resolved_dict

ROOT = Path(__file__).resolve().parents[1]
CODE = ("megatron_lite", "launch", "tools")
SCRIPT = "train.sbatch"
REFUSED = 2
FIRST_LEAD = 120
"""Seconds before the time limit at which a run is asked to leave, where nothing was measured."""
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


class Refused(Exception):
    """The input is at fault."""


@dataclass(frozen=True)
class Shape:
    """Machines, and processes on each."""

    nodes: int
    tasks_per_node: int


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="JSON file that describes the run")
    parser.add_argument("--run-dir", type=Path, help="default: runs/<config file's stem>")
    parser.add_argument(
        "--set", action="append", default=[], metavar="section.key=JSON", help="override a value"
    )
    parser.add_argument(
        "--site", type=Path, metavar="FILE", help="facts of the cluster, NAME=value"
    )
    parser.add_argument("--dependency", help="as of sbatch, such as afterok:1234")
    parser.add_argument(
        "--chain", type=int, default=1, metavar="N", help="N jobs, each after the one before"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script; write and submit nothing"
    )
    return parser.parse_args()


def main() -> int:
    """Submit; returns the exit code."""
    args = parse()
    try:
        if args.chain < 1:
            raise Refused(f"--chain {args.chain}: must be at least 1")
        site = read_site(args.site) if args.site is not None else {}
        loaded = load_config(args.config, args.set, None, check_files=True)
        run_dir = (args.run_dir or Path("runs") / args.config.stem).resolve()
        script = batch_script(loaded, run_dir, shape(loaded, site))
        if args.dry_run:
            print(script, end="")
        else:
            prepare(loaded, run_dir, script)
        submit(job_name(loaded, run_dir), run_dir, args, site)
    except (ConfigError, Refused, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def read_site(path: Path) -> dict[str, str]:
    """The values of a file of NAME=value lines, to the byte: nothing is expanded or executed."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise Refused(f"{path}: line {number}: {text!r} is not NAME=value")
        name, value = match[1], match[2]
        if name in found:
            raise Refused(f"{path}: line {number}: {name} is given twice")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if quoted else value
    return found


def shape(loaded: LoadedConfig, site: Mapping[str, str]) -> Shape:
    """Nodes and tasks: the config's, or as many nodes as its ranks need where the site's nodes have
    another number of GPUs."""
    launch, ranks = loaded.config.launch, loaded.world_size
    given = site.get("GPUS_PER_NODE", str(launch.gpus_per_node))
    if not given.isdecimal() or int(given) < 1:
        raise Refused(f"GPUS_PER_NODE={given}: must be a whole number of at least 1")
    each = min(int(given), ranks)
    if ranks % each:
        raise Refused(f"{ranks} ranks can't be spread evenly over nodes of {each} GPUs")
    return Shape(ranks // each, each)


def lead(run_dir: Path) -> int:
    """Seconds before the limit at which the run must be asked to leave.

    Of the run's own slowest step and save so far, twice, and half a minute for the agreement.
    """
    log = run_dir / "metrics.jsonl"
    if not log.is_file():
        return FIRST_LEAD
    rows = list(_rows(log))
    saves = [row["elapsed_ms"] for row in rows if row["event"] == "save"]
    steps = [row["elapsed_ms_per_iteration"] for row in rows if row["event"] == "train"]
    if not saves or not steps:
        return FIRST_LEAD
    return int(30 + 2 * (max(saves) + max(steps)) / 1000)


def _rows(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # a killed run may leave half a row
            yield json.loads(line)


def prepare(loaded: LoadedConfig, run_dir: Path, script: str) -> None:
    """Fill the run folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "submitted.json").write_text(json.dumps(resolved_dict(loaded.config), indent=2))
    code = run_dir / "code"
    for name in CODE:
        shutil.rmtree(code / name, ignore_errors=True)
        shutil.copytree(
            ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    (run_dir / SCRIPT).write_text(script)


def batch_script(loaded: LoadedConfig, run_dir: Path, shape: Shape) -> str:
    """The text of launch/train.sbatch with this run's options in the place of its own."""
    lines = (ROOT / "launch" / SCRIPT).read_text().splitlines()
    options = [f"#SBATCH {option}" for option in _options(loaded, run_dir, shape)]
    first = next(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    kept = [line for line in lines[first:] if not line.startswith("#SBATCH")]
    return "\n".join([*lines[:first], *options, *kept]) + "\n"


def _options(loaded: LoadedConfig, run_dir: Path, shape: Shape) -> Iterator[str]:
    launch = loaded.config.launch
    yield f"--job-name={job_name(loaded, run_dir)}"
    yield f"--nodes={shape.nodes}"
    yield f"--ntasks-per-node={shape.tasks_per_node}"
    for name in ("partition", "account", "time"):
        value = getattr(launch, name)
        if value is not None:
            yield f"--{name}={value}"
    yield f'--output="{run_dir}/%x-%j.out"'
    yield "--open-mode=append"
    yield f"--signal=USR1@{lead(run_dir)}"
    yield "--requeue" if launch.requeue else "--no-requeue"


def job_name(loaded: LoadedConfig, run_dir: Path) -> str:
    """The config's, or the run folder's."""
    return loaded.config.launch.job_name or run_dir.name


def submit(name: str, run_dir: Path, args: argparse.Namespace, site: Mapping[str, str]) -> None:
    """Hand the script to sbatch, once for each job of the chain, and tell where to look."""
    # The job sees the variables as they are here; PYTHONPATH is added to, not replaced.
    environment = {**os.environ, **site}
    path = filter(None, [str(run_dir / "code"), environment.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment.setdefault("PYTHON", sys.executable)
    dependency, script = args.dependency, run_dir / SCRIPT
    if not args.dry_run:
        print(f"script       {script}")
    for _ in range(args.chain):
        command = ["sbatch", "--parsable", f"--chdir={Path.cwd()}"]
        command += [f"--dependency={dependency}"] if dependency else []
        command += [str(script), str(run_dir / "submitted.json"), "--run-dir", str(run_dir)]
        if args.dry_run:
            print(" ".join(command))
            return
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"sbatch refused the job: {done.stderr.strip()}")
        job = done.stdout.strip().partition(";")[0]
        print(f"job          {job}")
        print(f"log          {run_dir}/{name}-{job}.out")
        dependency = f"afterany:{job}"
    print(f"tensorboard  tensorboard --logdir {run_dir}")


if __name__ == "__main__":
    sys.exit(main())
