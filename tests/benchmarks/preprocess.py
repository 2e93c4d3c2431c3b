"""Speed of preprocessing beside the limits: the tokenizers on strings that are in memory already.

`python tests/benchmarks/preprocess.py [--quick] [--folder DIR] [--repetitions N]`. Ours is the tool
as a user starts it, from JSON lines on disk to .bin/.idx on disk; the seconds are those that it
reports, from the first read to the final names, without its start, which is given apart (theirs
don't count their start either). MB are those of the texts. Everyone in turn, medians. The fast ones
get 200 MB, the others its beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from preprocess_corpus import Work, make_work

HERE = Path(__file__).resolve().parent
FULL = {"full": 200_000_000, "part": 80_000_000, "vocab_size": 32_000, "characters": 8_000_000}
QUICK = {"full": 600_000, "part": 200_000, "vocab_size": 600, "characters": 200_000}
CORES = len(os.sched_getaffinity(0))


@dataclass
class Lane:
    """The measurements of one contestant."""

    rates: list[float] = field(default_factory=list)
    """MB of text a second."""
    tokens: int = 0
    bytes: int = 0

    def rate(self) -> float:
        """The median."""
        return median(self.rates)


def main() -> int:
    """Measure; the last line of the output is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny corpus: shows that it runs")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--repetitions", type=int, help="default: 3")
    args = parser.parse_args()
    repetitions = args.repetitions or (1 if args.quick else 3)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        work = make_work(Path(folder), **(QUICK if args.quick else FULL))
        facts = measure(work, repetitions)
    print(json.dumps({"quick": args.quick, "repetitions": repetitions, **facts}))
    return 0


def measure(work: Work, repetitions: int) -> dict[str, Any]:
    """Let all take turns; print a table and return its facts."""
    lanes: dict[str, Lane] = {}
    starts, peaks = [], []

    def note(name: str, told: dict[str, Any]) -> None:
        lane = lanes.setdefault(name, Lane())
        lane.tokens, lane.bytes = told["tokens"], told["bytes"]
        lane.rates.append(told["bytes"] / 1e6 / told["seconds"])

    hf = str(work.hf)
    bpe, unigram = (str(work.sentencepiece(kind)) for kind in ("bpe", "unigram"))
    piece = "SentencePieceTokenizer"
    turns = [  # theirs, and ours right after it: name, tokenizer type, engine
        ("gigatoken", work.full, hf, ("ours gigatoken", "HFTokenizer", "gigatoken")),
        ("encode_batch_fast", work.part, hf, ("ours native", "HFTokenizer", "native")),
        ("sentencepiece bpe", work.part, bpe, ("ours sp bpe", piece, "auto")),
        ("sentencepiece unigram", work.part, unigram, ("ours sp unigram", piece, "auto")),
        ("datasets.map", work.part, hf, None),
    ]
    for _ in range(repetitions):
        for name, corpus, model, ours in turns:
            told = json.loads(_call([HERE / "preprocess_work.py", name, corpus, model])[0])
            note(name, told)
            if ours is not None:
                run = preprocess(corpus, work.folder / "out", ours[1], model, ours[2])
                note(ours[0], {**run, "bytes": told["bytes"]})
                starts.append(run["start"])
                peaks.append(run["peak"])
    for name, lane in lanes.items():
        rate = lane.rate()
        print(
            f"{name:<24} {rate:8.2f} MB/s {rate * lane.tokens / lane.bytes:8.3f} M tokens/s "
            f"({lane.bytes / 1e6:.0f} MB, {lane.tokens} tokens)"
        )
    return facts(lanes, starts, peaks)


def facts(lanes: dict[str, Lane], starts: Sequence[float], peaks: Sequence[int]) -> dict[str, Any]:
    """The JSON."""

    def ratio(one: str, other: str) -> float:
        return round(lanes[one].rate() / lanes[other].rate(), 3)

    return {
        "hf_bpe_vs_gigatoken": ratio("ours gigatoken", "gigatoken"),
        "hf_bpe_vs_tokenizers": ratio("ours native", "encode_batch_fast"),
        "sp_bpe_vs_raw": ratio("ours sp bpe", "sentencepiece bpe"),
        "sp_unigram_vs_raw": ratio("ours sp unigram", "sentencepiece unigram"),
        # The engine that the tool takes by itself; below, the one that datasets.map has too.
        "hf_vs_datasets_map": ratio("ours gigatoken", "datasets.map"),
        "hf_native_vs_datasets_map": ratio("ours native", "datasets.map"),
        "peak_rss_mb": round(max(peaks) / 1e6, 1),
        "start_up_s": round(max(starts), 2),
        "mb_per_s": {name: round(lane.rate(), 2) for name, lane in lanes.items()},
        "cores": CORES,
    }


def preprocess(corpus: Path, prefix: Path, kind: str, model: str, engine: str) -> dict[str, Any]:
    """Run our tool; its seconds and tokens, what it needed to start, its processes' peak memory."""
    tool = HERE.parents[1] / "tools/preprocess_data.py"
    flags = ["--input", corpus, "--output-prefix", prefix, "--tokenizer-type", kind]
    flags += ["--tokenizer-model", model, "--tokenizer-engine", engine]
    started = time.perf_counter()
    text, peak = _call([tool, *flags, "--workers", CORES, "--log-interval", 10**12], watched=True)
    whole = time.perf_counter() - started
    seconds = float(_found(r"MB in ([0-9.]+) s", text))
    return {
        "seconds": seconds,
        "start": whole - seconds,
        "tokens": int(_found(r"documents, (\d+) tokens", text)),
        "peak": peak,
    }


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in the report of the tool:\n{text}")
    return match[1]


def _call(command: Sequence[Any], *, watched: bool = False) -> tuple[str, int]:
    """Run a Python program; what it prints, and if watched the most memory of its whole tree."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    watch = _Watch(process.pid)
    if watched:
        watch.start()
    output, errors = process.communicate()
    watch.ended.set()
    if process.returncode:
        sys.exit(f"{command} failed:\n{errors}")
    return output, watch.peak


class _Watch(threading.Thread):
    """Adds up the resident memory of a process and all below it, twenty times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.peak = 0
        self._pid = pid

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, self._resident())

    def _resident(self) -> int:
        total = 0
        try:
            root = psutil.Process(self._pid)
            for process in (root, *root.children(recursive=True)):
                total += process.memory_info().rss
        except psutil.Error:  # one of them has just ended
            pass
        return total


if __name__ == "__main__":
    sys.exit(main())
