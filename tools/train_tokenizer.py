"""Train a tokenizer on a text field: SentencePiece (unigram, bpe) or byte-level BPE."""

from __future__ import annotations

import argparse
import sys

from megatron_lite.data.tool_runner import run_data_tool

_MODEL_TYPES = ("unigram", "bpe", "byte-level-bpe")
_EPILOG = """unigram and bpe write a SentencePiece .model (--tokenizer-type SentencePieceTokenizer),
byte-level-bpe a tokenizer.json of the Hugging Face package tokenizers (--tokenizer-type
HFTokenizer), whose end of document is <|endoftext|>. Any text survives a round trip."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders and globs that preprocess_data.py reads",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of ids")
    parser.add_argument("--model-type", choices=_MODEL_TYPES, default="unigram", help="algorithm")
    parser.add_argument("--json-key", default="text", help="field with the text")
    parser.add_argument(
        "--max-characters", type=int, default=3_000_000, help="use at most about so much text"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="of SentencePiece; another number may give another model",
    )
    return parser.parse_args()


def main() -> None:
    """Parse the flags and train."""
    options = vars(_parse())
    if options["model_type"] == "byte-level-bpe":
        from megatron_lite.data.bpe_training import train_byte_level_bpe

        del options["model_type"], options["threads"]
        used, unit = train_byte_level_bpe(**options), "texts"
    else:
        from megatron_lite.data.sentencepiece_training import train_sentencepiece

        used, unit = train_sentencepiece(**options), "lines"
    print(f"trained {options['vocab_size']} pieces on {used} {unit}: {options['output']}")


if __name__ == "__main__":
    sys.exit(run_data_tool(main))
