"""Entry point: config → distributed → build → fit. Started alone, by torchrun, deepspeed or srun.

`python -m megatron_lite.train CONFIG [--run-dir DIR] [--set section.key=JSON …] [--validate-only]`
Exit codes: 0 done, 2 refused, 3 stopped on request with a checkpoint saved, otherwise failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.command import reason, run_tool
from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import LoadedConfig, load_config
from megatron_lite.config.resuming import COMPARED, SavedRun, resume_config
from megatron_lite.config.schema import CheckpointConfig
from megatron_lite.health.stopping import StopRequest
from megatron_lite.health.time_limit import TimeLimit
from megatron_lite.health.watch import parent_of
from megatron_lite.occupancy import Occupied, is_occupied, occupy
from megatron_lite.outcome import Outcome
from megatron_lite.rendezvous import launch_facts

DONE, FAILED, REFUSED, REQUEUE = 0, 1, 2, 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m megatron_lite.train", description=__doc__)
    parser.add_argument("config", type=Path, help="JSON file that describes the run")
    parser.add_argument(
        "--run-dir", type=Path, help="folder of the run (default: runs/<config file's stem>)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=JSON",
        help="override a value of the config; may be repeated",
    )
    parser.add_argument(
        "--validate-only",
        action="store_true",
        help="check the config, print what it resolves to and where each value comes from",
    )
    # The deepspeed launcher adds it; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.run_dir = args.run_dir or Path("runs") / args.config.stem
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    args = parse(argv)
    launched = launch_facts(os.environ)
    stop, time_limit = StopRequest(), TimeLimit.of(os.environ)
    stop.listen(signal.SIGUSR1)
    # Read now: by the time torch is imported a launcher may be gone.
    ancestors = lineage(os.environ)
    try:
        loaded = configure(args, launched)
    except (ConfigError, CheckpointError) as error:
        return refuse(str(error), args, launched)
    if args.validate_only:
        return run_tool(lambda: show(loaded), refused=ConfigError)
    try:
        args.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return refuse(f"--run-dir {args.run_dir}: {reason(error)}", args, launched)
    try:
        held = occupy(args.run_dir) if launched.get("rank", 0) == 0 else None
    except Occupied as error:  # not for status.json, which is the other run's
        print(error, file=sys.stderr, flush=True)
        return REFUSED
    with held or nullcontext():
        return start(loaded, args, launched, stop=stop, time_limit=time_limit, ancestors=ancestors)


def start(
    loaded: LoadedConfig,
    args: argparse.Namespace,
    launched: Mapping[str, int],
    *,
    stop: StopRequest,
    time_limit: TimeLimit,
    ancestors: Sequence[int],
) -> int:
    """Prepare what is to be there before torch is imported, and run; returns the exit code."""
    Outcome(args.run_dir, rank=launched.get("rank", 0)).forget()
    for name, value in loaded.config.launch.environment.items():
        os.environ.setdefault(name, value)
    # torch and deepspeed cost seconds to import; a config is checked without them.
    import torch

    # Compiled kernels belong to the environment they were compiled in: two of them that share
    # torch's default folder would compile over each other.
    if os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    if not torch.cuda.is_available():
        # DeepSpeed would find the CPU by itself, with a warning from every rank.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megatron_lite.session import run

    return run(loaded, args.run_dir, launched, stop=stop, time_limit=time_limit, lineage=ancestors)


def configure(args: argparse.Namespace, launched: Mapping[str, int]) -> LoadedConfig:
    """The run's config; where it goes on from a checkpoint, with what was chosen for that one."""
    world_size = None if args.validate_only and not launched else launched.get("world_size", 1)
    check_files = not args.validate_only
    loaded = load_config(args.config, args.set, world_size, check_files=check_files)
    if loaded.config.checkpoint.finetune:
        return loaded
    saved = saved_run(loaded.config.checkpoint, args.run_dir)
    if saved is None:
        return loaded
    return resume_config(args.config, args.set, world_size, check_files=check_files, saved=saved)


def saved_run(config: CheckpointConfig, run_dir: Path) -> SavedRun | None:
    """The config in the checkpoint that is to be loaded; None where there is none.

    CheckpointError where it can't be read: a run must not go on with other settings unnoticed.
    """
    if config.load is None:
        return None
    folders, _ = store.candidates(
        run_dir / config.load, step=config.ckpt_step, fall_back=config.fall_back_to_older
    )
    for folder in folders:
        try:
            saved, origins = store.read_config(folder)
            if missing := [name for name in COMPARED if name not in saved]:
                raise CheckpointError(f"{folder / store.CONFIG}: damaged (no section {missing[0]})")
            return SavedRun(folder.name, saved, origins)
        except CheckpointError:
            if folder == folders[-1]:
                raise
    return None


def refuse(error: str, args: argparse.Namespace, launched: Mapping[str, int]) -> int:
    """Tell why a run does not start, once for all ranks; returns the exit code."""
    outcome = Outcome(args.run_dir, rank=launched.get("rank", 0))
    if launched.get("rank", 0) > 0:
        # Rank 0 tells first; a launcher kills all ranks when the first one ends.
        time.sleep(3)
        if args.validate_only or outcome.read().get("error") == error:
            return REFUSED
    elif not args.validate_only and args.config.is_file() and not is_occupied(args.run_dir):
        with suppress(OSError):  # told below in any case
            outcome.write("refused", error=error)
    print(error, file=sys.stderr, flush=True)
    return REFUSED


def show(loaded: LoadedConfig) -> None:
    """Print the resolved config; warnings go to stderr."""
    from megatron_lite.config.render import render_resolved
    from megatron_lite.config.validate import missing_files

    print(render_resolved(loaded))
    for line in loaded.notes:
        print(f"// {line}")
    for line in [*loaded.warnings, *map(str, missing_files(loaded.config))]:
        print(f"warning: {line}", file=sys.stderr)


def lineage(env: Mapping[str, str]) -> list[int]:
    """This process and the launchers above it, whose death must end it too; [] without any.

    The parent is torchrun or launch/node.py; under deepspeed it is a child of the command itself.
    """
    if "CROSS_RANK" in env:
        parent = os.getppid()
        return [os.getpid(), parent, parent_of(parent)]
    is_launched = "TORCHELASTIC_RUN_ID" in env or "MEGATRON_LITE_NODE" in env
    return [os.getpid(), os.getppid()] if is_launched else []


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until session.py listens: torch takes seconds to import, and nothing is to be saved yet.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
