"""Say which rank of a run lags: rank, node, phase, and for whom the others wait; print all stacks.

Reads the files that ranks leave in the run's folder (heartbeats, stacks, status.json), so it works
from any machine that sees the folder, also when every rank hangs in C code; on the machine of a
rank it also looks at the process. Looks for a second, or for some where a heartbeat does not beat.
Exit codes: 0 all ranks move or are done, 1 a rank lags or nothing moves, 2 no run there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_lite.command import run_tool
from megatron_lite.health.diagnosis import MOVES_WITHIN
from megatron_lite.health.examination import Examination


class Ill(Exception):
    """The answer is no: a rank lags, or nothing moves."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument(
        "--moves-within",
        type=float,
        default=MOVES_WITHIN,
        metavar="SECONDS",
        help="a run in which some rank moved within so many seconds is well (default: %(default)g)",
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="let the ranks of this machine write their stacks now (SIGUSR2), also those in C code",
    )
    parser.add_argument("--all", action="store_true", help="a line for each of many ranks")
    return parser.parse_args()


def main() -> None:
    """Print the answer, a table of the ranks, and the stacks."""
    args = parse()
    examination = Examination.of(args.run_dir, moves_within=args.moves_within)
    for line in examination.lines(all_ranks=args.all):
        print(line)
    print()
    for line in examination.stack_lines(ask=args.stacks):
        print(line)
    if not examination.well:
        raise Ill(examination.in_short())


if __name__ == "__main__":
    sys.exit(run_tool(main, refused=ValueError, failed=(Ill,)))
