"""Describe a .bin/.idx pair: header, counts, token range, and documents as text."""

from __future__ import annotations

import argparse
import sys

from megatron_lite.data.inspection import check, describe
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.data.tool_runner import add_tokenizer_flags, run_data_tool


def main() -> None:
    """Parse the flags and print the description."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", help="path without .bin or .idx")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="show the start of the first N documents"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail on empty documents and impossible token ids"
    )
    add_tokenizer_flags(parser, required=False)
    options = parser.parse_args()
    tokenizer = None
    if options.tokenizer_type is not None:
        tokenizer = build_tokenizer(
            options.tokenizer_type,
            model=options.tokenizer_model,
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
            vocab_size=options.vocab_size,
        )
    for line in describe(options.prefix, show=options.show, tokenizer=tokenizer):
        print(line)
    if options.check:
        check(options.prefix, tokenizer=tokenizer)
        print("check        passed")


if __name__ == "__main__":
    sys.exit(run_data_tool(main))
