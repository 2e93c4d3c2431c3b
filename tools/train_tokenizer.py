"""Train a SentencePiece tokenizer on a text field of JSON lines."""

from __future__ import annotations

import argparse
import sys

from megatron_lite.data.sentencepiece_training import MODEL_TYPES, train_sentencepiece
from megatron_lite.data.tool_runner import run_data_tool


def main() -> None:
    """Parse the flags and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="FILE", help=".jsonl or .jsonl.gz files"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the .model file to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of ids")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="unigram", help="algorithm")
    parser.add_argument("--json-key", default="text", help="field with the text")
    parser.add_argument(
        "--max-characters", type=int, default=3_000_000, help="use at most about so much text"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="another number may give another model"
    )
    options = parser.parse_args()
    lines = train_sentencepiece(**vars(options))
    print(f"trained {options.vocab_size} pieces on {lines} lines: {options.output}")


if __name__ == "__main__":
    sys.exit(run_data_tool(main))
