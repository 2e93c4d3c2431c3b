"""Turn JSON lines into the .bin/.idx token files that training reads, one pair a field."""

from __future__ import annotations

import argparse
import sys

from megatron_lite.data.preprocess import PreprocessOptions, preprocess
from megatron_lite.data.tool_runner import add_tokenizer_flags, run_data_tool

_EPILOG = """Writes PREFIX_KEY_document.bin and .idx (PREFIX_KEY_sentence with --split-sentences).
Special tokens: none by default, and none that a tokenizer's own template would add; text that
spells a special token is plain text. Documents without a token are dropped and counted. Lone
surrogates become U+FFFD. A bad line stops the run; output names appear only when all is well."""


def _parse() -> PreprocessOptions:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EPILOG)
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="FILE", help=".jsonl or .jsonl.gz files"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields (default: text)"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    add_tokenizer_flags(parser, required=True)
    parser.add_argument("--append-eod", action="store_true", help="put the end-of-document id last")
    parser.add_argument(
        "--prepend-bos", action="store_true", help="put the begin-of-document id first"
    )
    parser.add_argument(
        "--split-sentences", action="store_true", help="one sequence a sentence, not a document"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes (default: 1)"
    )
    parser.add_argument(
        "--log-interval",
        type=int,
        default=10_000,
        metavar="N",
        help="documents between progress lines where there is no terminal (default: 10000)",
    )
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="drop and count lines that can't be used"
    )
    parser.add_argument(
        "--skip-missing-keys",
        action="store_true",
        help="drop and count fields that a record lacks or has as null",
    )
    return PreprocessOptions(**vars(parser.parse_args()))


def main() -> None:
    """Parse the flags, preprocess and print the report."""
    options = _parse()
    begin, end = ("yes" if flag else "no" for flag in (options.prepend_bos, options.append_eod))
    print(f"special tokens: begin of document {begin}, end of document {end}", flush=True)
    for line in preprocess(options).lines(options):
        print(line)


if __name__ == "__main__":
    sys.exit(run_data_tool(main))
