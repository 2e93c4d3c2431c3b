"""Turn texts into the .bin/.idx token files that training reads, one pair a field."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_lite.data.engine import ENGINES
from megatron_lite.data.inputs import FORMATS, TEXT_DOCUMENTS
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.preprocess_options import PreprocessOptions
from megatron_lite.data.tool_runner import add_tokenizer_flags, run_data_tool

_EPILOG = """Writes PREFIX_KEY_document.bin and .idx (PREFIX_KEY_sentence with --split-sentences).
Documents keep the order of the input; any number of workers gives the same bytes. Special tokens:
none by default, and none that a tokenizer's own template would add; text that spells a special
token is plain text. Documents without a token are dropped and counted. Lone surrogates become
U+FFFD. A bad line stops the run; output names appear only when all is well. Until then the work
lies in PREFIX.preprocess: a run that was stopped, killed or refused after some time goes on from
there with the same command, or with --skip-bad-lines or --skip-missing-keys added."""
_MOST_WORKERS = 8  # by default; each takes memory of its own


def _parse() -> PreprocessOptions:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EPILOG)
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders or globs of .jsonl, .json, .txt (each also .gz or .zst), .parquet and "
        ".arrow, and data sets saved by the package datasets; folders and globs in sorted order",
    )
    parser.add_argument(
        "--input-format",
        choices=("auto", *FORMATS),
        default="auto",
        help="default: by the file's name, JSON lines where it says nothing",
    )
    parser.add_argument(
        "--text-documents",
        choices=TEXT_DOCUMENTS,
        default="file",
        help="what one document is in .txt files, whose field is called text (default: file)",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields (default: text)"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    add_tokenizer_flags(parser, required=True)
    parser.add_argument(
        "--tokenizer-engine",
        choices=ENGINES,
        default="auto",
        help="auto (default): gigatoken for byte-level BPE where it is installed and gives the "
        "tokenizer's own tokens, else the tokenizer; gigatoken: the same, or stop",
    )
    parser.add_argument(
        "--check-every",
        type=int,
        default=2000,
        metavar="N",
        help="with gigatoken, encode every N-th document with the tokenizer too; where they differ "
        "auto does the block again and all the rest with the tokenizer (default: 2000)",
    )
    parser.add_argument("--append-eod", action="store_true", help="put the end-of-document id last")
    parser.add_argument(
        "--prepend-bos", action="store_true", help="put the begin-of-document id first"
    )
    parser.add_argument(
        "--split-sentences", action="store_true", help="one sequence a sentence, not a document"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(len(os.sched_getaffinity(0)), _MOST_WORKERS),
        metavar="N",
        help=f"processes (default: one a core, at most {_MOST_WORKERS})",
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
    parser.add_argument(
        "--restart", action="store_true", help="throw away what a stopped run left and begin anew"
    )
    return PreprocessOptions(**vars(parser.parse_args()))


def main() -> None:
    """Parse the flags, preprocess and print the report."""
    options = _parse()
    if options.workers > 1:  # they share the cores already
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    begin, end = ("yes" if flag else "no" for flag in (options.prepend_bos, options.append_eod))
    print(f"special tokens: begin of document {begin}, end of document {end}", flush=True)
    for line in preprocess(options).lines(options.prefixes()):
        print(line)


if __name__ == "__main__":
    sys.exit(run_data_tool(main, interrupted="interrupted; the same command goes on from here"))
