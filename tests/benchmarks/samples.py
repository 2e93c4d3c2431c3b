"""From opening token files to the first batch: time and memory beside megatron-core's builder.

`python tests/benchmarks/samples.py [--quick] [--folder DIR] [--repetitions N]`. 10 million
documents of 800 tokens on average, sequence 2,048, for 1 and for 3 epochs; every measurement in a
process of its own, in turn, imports apart, files in the page cache; medians. The .bin is a hole of
16 GB, the .idx takes 200 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_lite.data.indexed_dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    byte_offsets,
    idx_path,
)

HERE = Path(__file__).parent
DOCUMENTS, QUICK_DOCUMENTS, MEAN_LENGTH = 10_000_000, 20_000, 800
EPOCHS = (1, 3)


def main() -> int:
    """Measure; the last line of the output is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few documents: shows that it runs")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--repetitions", type=int, help="default: 5")
    args = parser.parse_args()
    documents = QUICK_DOCUMENTS if args.quick else DOCUMENTS
    repetitions = args.repetitions or (1 if args.quick else 5)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        prefix = Path(folder) / "corpus"
        tokens = write_corpus(prefix, documents)
        print(f"{documents:,} documents, {tokens:,} tokens", flush=True)
        facts = measure(prefix, repetitions=repetitions)
    print(json.dumps({"quick": args.quick, "repetitions": repetitions, **facts}))
    return 0


def write_corpus(prefix: Path, documents: int) -> int:
    """Write a pair whose documents have geometrically distributed lengths; returns its tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / MEAN_LENGTH, documents).astype("<i4")
    dtype = np.dtype("<u2")
    offsets = byte_offsets(lengths, dtype.itemsize)
    code = DTYPES.index(dtype) + 1
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, documents, documents + 1))
        for part in (lengths, offsets[:-1], np.arange(documents + 1, dtype="<i8")):
            file.write(part.tobytes())
    with bin_path(prefix).open("wb") as file:
        file.truncate(int(offsets[-1]))
    return int(offsets[-1]) // dtype.itemsize


def measure(prefix: Path, *, repetitions: int) -> dict[str, Any]:
    """Let both take turns; print a table and return its facts."""
    told: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(repetitions):
        for epochs in EPOCHS:
            for name in ("ours", "theirs"):
                told.setdefault((name, epochs), []).append(apart(name, prefix, epochs))
    seconds = {key: median(one["seconds"] for one in runs) for key, runs in told.items()}
    peaks = {key: max(one["rss"] for one in runs) / 1e6 for key, runs in told.items()}
    for (name, epochs), value in seconds.items():
        who = {"ours": "megatron_lite", "theirs": "megatron-core"}[name]
        peak = peaks[name, epochs]
        print(f"{who:<14} {epochs} epoch(s): {value:8.3f} s to the first batch, {peak:7.1f} MB")
    return {
        "first_batch_s_1_epoch": round(seconds["ours", 1], 3),
        "first_batch_s_3_epochs": round(seconds["ours", 3], 3),
        "speedup_vs_megatron_core": round(seconds["theirs", 3] / seconds["ours", 3], 1),
        "peak_rss_mb": round(max(peaks["ours", epochs] for epochs in EPOCHS), 1),
        "megatron_core_s_1_epoch": round(seconds["theirs", 1], 3),
        "megatron_core_s_3_epochs": round(seconds["theirs", 3], 3),
        "megatron_core_peak_rss_mb": round(max(peaks["theirs", epochs] for epochs in EPOCHS), 1),
    }


def apart(name: str, prefix: Path, epochs: int) -> dict[str, float]:
    """Measure one contestant in a process of its own."""
    command = [sys.executable, HERE / "samples_work.py", name, prefix, str(epochs)]
    root = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
