"""Turn chat JSON lines into packed conversations with a loss mask, for supervised fine-tuning."""

from __future__ import annotations

import argparse
import sys

from megatron_lite.data.chat import (
    CHAT_TEMPLATES,
    LONG_CONVERSATIONS,
    ChatOptions,
    preprocess_chat,
)
from megatron_lite.data.tool_runner import add_tokenizer_flags, run_data_tool

_EPILOG = """A line is {"messages": [{"role": "user", "content": "..."}, ...]}. Writes
PREFIX_messages_document.bin and .idx, and the loss mask beside them; name the prefix as
data.data_path and set data.sft. Only what the assistant says has a loss. Conversations are packed
whole into sequences of seq_length + 1 tokens, the rest is padding without a loss."""


def _parse() -> ChatOptions:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EPILOG)
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="FILE", help=".jsonl or .jsonl.gz files"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument(
        "--seq-length", type=int, required=True, metavar="N", help="model.seq_length of the run"
    )
    parser.add_argument(
        "--json-key", default="messages", metavar="KEY", help="field (default: messages)"
    )
    add_tokenizer_flags(parser, required=True)
    parser.add_argument(
        "--chat-template",
        choices=CHAT_TEMPLATES,
        default="tokenizer",
        help="tokenizer (default): that of the HFTokenizer's folder; plain: <|role|>, a line feed, "
        "the content, the end-of-document token",
    )
    parser.add_argument(
        "--long-conversations",
        choices=LONG_CONVERSATIONS,
        default="refuse",
        help="what is done with conversations of more than N + 1 tokens (default: refuse)",
    )
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="drop and count lines that can't be used"
    )
    return ChatOptions(**vars(parser.parse_args()))


def main() -> None:
    """Parse the flags, preprocess and print the report."""
    options = _parse()
    for line in preprocess_chat(options).lines(options):
        print(line)


if __name__ == "__main__":
    sys.exit(run_data_tool(main))
