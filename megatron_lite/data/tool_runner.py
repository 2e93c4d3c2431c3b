"""What the data tools share: the tokenizer's flags, and which exceptions are the input's fault."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron_lite.command import run_tool
from megatron_lite.data.errors import DataError, WorkerDiedError
from megatron_lite.data.tokenizer import TOKENIZER_TYPES


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add --tokenizer-type, --tokenizer-model, --vocab-file, --merge-file and --vocab-size."""
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, required=required)
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="the .model file (SentencePieceTokenizer), or tokenizer.json or its folder "
        "(HFTokenizer); for NullTokenizer the number of ids",
    )
    parser.add_argument("--vocab-file", metavar="PATH", help="vocab.json (GPT2BPETokenizer)")
    parser.add_argument("--merge-file", metavar="PATH", help="merges.txt (GPT2BPETokenizer)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of ids of NullTokenizer; the highest, N - 1, is the end of document",
    )


def run_data_tool(
    main: Callable[[], None], *, interrupted: str = "interrupted; nothing was left behind"
) -> int:
    """Run a data tool and return its exit code; `interrupted` is said after Ctrl-C."""
    return run_tool(main, refused=DataError, failed=(WorkerDiedError,), interrupted=interrupted)
