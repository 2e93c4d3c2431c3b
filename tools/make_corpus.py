"""Write a small JSON-lines corpus from the running Python's standard library."""

from __future__ import annotations

import argparse
import sys

from megatron_lite.data.corpus import make_corpus
from megatron_lite.data.tool_runner import run_data_tool


def main() -> None:
    """Parse the flags and make the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, metavar="FILE", help="the .jsonl file to write")
    report = make_corpus(parser.parse_args().output)
    print(
        f"wrote {report.documents} documents, {report.bytes / 1e6:.1f} MB, from {report.files} "
        f"files; skipped, not UTF-8: {report.skipped}"
    )


if __name__ == "__main__":
    sys.exit(run_data_tool(main))
