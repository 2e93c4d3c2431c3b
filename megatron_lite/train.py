"""Entry point: config → distributed → build → fit. Started alone, by torchrun, deepspeed or srun.

`python -m megatron_lite.train CONFIG [--run-dir DIR] [--set section.key=JSON …] [--validate-only]`
Exit codes: 0 done, 2 refused, 3 stopped on request with a checkpoint saved, otherwise failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import LoadedConfig, load_config

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
    try:
        loaded = load_config(
            args.config,
            args.set,
            None if args.validate_only and not launched else launched.get("world_size", 1),
            check_files=not args.validate_only,
        )
    except ConfigError as error:
        if launched.get("rank", 0) == 0:
            print(error, file=sys.stderr)
        else:
            # A launcher kills all ranks when the first one ends: let it be the one that prints.
            time.sleep(3)
        return REFUSED
    if args.validate_only:
        return show(loaded)
    # torch and deepspeed cost seconds to import; a config is checked without them.
    import torch

    if not torch.cuda.is_available():
        # DeepSpeed would find the CPU by itself, with a warning from every rank.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megatron_lite.session import run

    return run(loaded, args.run_dir, launched)


def show(loaded: LoadedConfig) -> int:
    """Print the resolved config; warnings go to stderr."""
    from megatron_lite.config.render import render_resolved
    from megatron_lite.config.validate import missing_files

    print(render_resolved(loaded))
    for line in [*loaded.warnings, *map(str, missing_files(loaded.config))]:
        print(f"warning: {line}", file=sys.stderr)
    return DONE


def launch_facts(env: Mapping[str, str]) -> dict[str, int]:
    """World size, rank and local rank, from torchrun's or deepspeed's variables, else Slurm's.

    Empty where the process was started alone.
    """
    names = {
        "world_size": ("WORLD_SIZE", "SLURM_NTASKS"),
        "rank": ("RANK", "SLURM_PROCID"),
        "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
    }
    for source in (0, 1):
        if names["world_size"][source] in env:
            return {fact: int(env.get(known[source], 0)) for fact, known in names.items()}
    return {}


if __name__ == "__main__":
    sys.exit(main())
