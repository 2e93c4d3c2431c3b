"""Join .bin/.idx pairs into one, in the order they are given, a folder's in the order of names."""

from __future__ import annotations

import argparse
import sys

from megatron_lite.data.merge import find_pairs, merge
from megatron_lite.data.tool_runner import run_data_tool


def main() -> None:
    """Parse the flags, merge and print what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="DIR",
        help="folders of pairs, or prefixes without .bin and .idx",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    options = parser.parse_args()
    prefixes = find_pairs(options.input)
    for prefix in prefixes:
        print(prefix)
    merged = merge(prefixes, options.output_prefix)
    print(
        f"{options.output_prefix}: {merged.num_documents} documents, {merged.num_tokens} tokens "
        f"({merged.dtype.name}) of {len(prefixes)} pairs"
    )


if __name__ == "__main__":
    sys.exit(run_data_tool(main))
