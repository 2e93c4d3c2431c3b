"""Submit a run to Slurm: check its config, leave all it needs in its folder, hand it to sbatch.

Each submission leaves a copy of the code, the resolved config and the batch script in a folder of
its own in the run folder, so that later changes here do not reach a job that waits or is queued
again. A run folder whose jobs are not over takes no further ones, unless those wait for them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import LoadedConfig, load_config, resolved_dict
from megatron_lite.config.rules.checkpoint import goes_on_from_what_it_saved
from megatron_lite.sbatch_options import Shape, Unusable, job_name, sbatch_options
from megatron_lite.submissions import (
    Job,
    QueueError,
    alone,
    demand_an_end,
    next_folder,
    note,
    on_cluster,
    unfinished,
)

ROOT = Path(__file__).resolve().parents[1]
CODE = ("megatron_lite", "launch", "tools")
SCRIPT = "train.sbatch"
CONFIG = "config.json"
REFUSED = 2
OF_ANOTHER_JOB = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_JOB_END_TIME")
"""Variables of the job in whose shell this one is submitted; sbatch would hand them on."""
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


class Refused(Exception):
    """The input is at fault."""


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
        if args.chain > 1:
            demand_going_on(loaded, "--chain")
        run_dir = (args.run_dir or Path("runs") / args.config.stem).resolve()
        prepare_and_submit(loaded, run_dir, args, site)
    except (ConfigError, Refused, Unusable, QueueError, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def demand_going_on(loaded: LoadedConfig, option: str) -> None:
    """ConfigError unless a job goes on from what the one before it saved, as `option` needs it."""
    problems = list(goes_on_from_what_it_saved(loaded.config, option))
    if problems:
        raise ConfigError([replace(p, origin=loaded.origins[p.path]) for p in problems])


def prepare_and_submit(
    loaded: LoadedConfig, run_dir: Path, args: argparse.Namespace, site: Mapping[str, str]
) -> None:
    """Fill the submission's folder and hand its script to sbatch; or show what would be."""
    launch, known = loaded.config.launch, {**os.environ, **site}
    limit = launch.time or known.get("SBATCH_TIMELIMIT")
    options = sbatch_options(launch, run_dir, shape(loaded, site), limit)
    script = batch_script(options)
    if args.dry_run:
        words = sbatch_command(next_folder(run_dir), run_dir, options, args.dependency)
        print(script + shlex.join(words))
        return
    demand_commands(known)
    with alone(run_dir):
        before = unfinished(run_dir, known)
        demand_an_end(run_dir, before, args.dependency)
        if before:
            demand_going_on(loaded, "--dependency")
        folder = next_folder(run_dir)
        fill(folder, loaded, script)
        print(f"script       {folder / SCRIPT}")
        env, dependency, earlier = environment(site, folder / "code"), args.dependency, [*before]
        for _ in range(args.chain):
            if earlier:  # a job can wait for others of its own cluster alone
                env = on_cluster(env, earlier[-1].cluster)
            job = submit(sbatch_command(folder, run_dir, options, dependency), env)
            tell_and_note(job, folder, f"{run_dir}/{job_name(launch, run_dir)}-{job.number}.out")
            # For all: where one that waits is cancelled, its followers may not begin at once.
            earlier.append(job)
            dependency = f"afterany:{':'.join(str(each.number) for each in earlier)}"
    print(f"tensorboard  tensorboard --logdir {shlex.quote(str(run_dir))}")


def sbatch_command(
    folder: Path, run_dir: Path, options: Sequence[str], dependency: str | None
) -> list[str]:
    """The words that submit what a folder holds."""
    waits = [f"--dependency={dependency}"] if dependency else []
    job = [str(folder / SCRIPT), str(folder / CONFIG), "--run-dir", str(run_dir)]
    return ["sbatch", "--parsable", f"--chdir={Path.cwd()}", *options, *waits, *job]


def demand_commands(env: Mapping[str, str]) -> None:
    """Refused where Slurm's commands are not there."""
    path = env.get("PATH")
    if lack := [name for name in ("sbatch", "squeue") if shutil.which(name, path=path) is None]:
        raise Refused(
            f"{' and '.join(lack)}: not found on the PATH; submit on a machine that has Slurm's "
            "commands, such as a login node of the cluster"
        )


def tell_and_note(job: Job, folder: Path, log: str) -> None:
    """Take note of a job that is submitted."""
    print(f"job          {job}")
    print(f"log          {log}", flush=True)
    try:
        note(folder, job)
    except OSError as error:
        raise Refused(
            f"job {job} is submitted, but {folder} can't keep that ({error.strerror}): cancel it, "
            "unless its run has room to write"
        ) from error


def read_site(path: Path) -> dict[str, str]:
    """The values of a file of NAME=value lines, to the byte: nothing is expanded or executed."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Refused(f"--site {path}: can't be read ({error})") from error
    for number, line in enumerate(lines, start=1):
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


def environment(site: Mapping[str, str], code: Path) -> dict[str, str]:
    """The variables of the job: as they are here, and the site's."""
    env = {**os.environ, **site}
    for name in OF_ANOTHER_JOB:
        env.pop(name, None)
    # Added to, not replaced.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(code), env.get("PYTHONPATH")]))
    # Or else `python -m` would look in the current folder first, where the code may have changed.
    env["PYTHONSAFEPATH"] = "1"
    env.setdefault("PYTHON", sys.executable)
    return env


def batch_script(options: Sequence[str]) -> str:
    """The text of launch/train.sbatch with this run's options in the place of its own."""
    lines = (ROOT / "launch" / SCRIPT).read_text().splitlines()
    own = [f"#SBATCH {shlex.quote(option)}" for option in options]
    first = next(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    kept = [line for line in lines[first:] if not line.startswith("#SBATCH")]
    return "\n".join([*lines[:first], *own, *kept]) + "\n"


def fill(folder: Path, loaded: LoadedConfig, script: str) -> None:
    """Leave in a new folder what the submission's jobs need; Refused, and nothing left, where that
    can't be written."""
    try:
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(json.dumps(resolved_dict(loaded.config), indent=2))
        for name in CODE:
            without = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, folder / "code" / name, ignore=without)
        (folder / SCRIPT).write_text(script)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        # Of a copied tree there is a fault a file.
        why = error.args[0][0][-1] if isinstance(error, shutil.Error) else error.strerror
        raise Refused(
            f"{folder}: can't be written ({why}); make room, or change --run-dir"
        ) from error


def submit(command: Sequence[str], env: Mapping[str, str]) -> Job:
    """Call sbatch; returns the job."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(
            f"sbatch gave no job: {done.stderr.strip()} (where it heard no answer in time, the job "
            "may be there nevertheless: see squeue --me)"
        )
    sys.stderr.write(done.stderr)  # a site's plugins may have something to say
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        return Job.of(last)
    except ValueError:
        raise Refused(f"sbatch printed no job's number: {done.stdout.strip()!r}") from None


if __name__ == "__main__":
    sys.exit(main())
