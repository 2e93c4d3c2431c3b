"""What the command-line tools share: the tokenizer's flags, and exceptions → stderr and exit code.

Codes: 0 done, 1 failed (a worker died), 2 bad usage or input, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable

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


def run_tool(main: Callable[[], None]) -> int:
    """Run a tool and return its exit code; bad input never shows a traceback."""
    signal.signal(signal.SIGTERM, _terminated)  # so that temporary files and workers go too
    try:
        main()
        sys.stdout.flush()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except WorkerDiedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
