"""Speed and memory of checkpoints beside the limits: `cp` and DeepSpeed's `ds_to_universal.py`.

`python tests/benchmarks/checkpoint.py [--quick] [--folder DIR] [--repetitions N]`. A state of about
336 M parameters (4 GB): saved, loaded, resharded tp1·pp1 → tp2·pp2 → tp4·pp1 by the tool in a
process of its own, proof included. Everyone in turn in one run, medians. Needs about 20 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_work import FULL, QUICK, Model, load, save

from megatron_lite.checkpoint.direct import THREADS
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.reshard import Target, plan

HERE = Path(__file__).parent
RESHARD = """
import json, sys, time
from pathlib import Path
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.reshard import Target, plan, reshard
def resident(name):
    # Not ru_maxrss: that begins with the parent's.
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) * 1024
source, root, tp, pp, workers = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
before = resident("VmRSS")
started = time.perf_counter()
planned = plan(Manifest.read(source), Target(tp=tp, pp=pp))
reshard(source, root, planned, workers=workers)
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "rss": resident("VmHWM") - before}))
"""


def main() -> int:
    """Measure; the last line of the output is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny state: shows that it runs")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--repetitions", type=int, help="default: 3")
    parser.add_argument("--workers", type=int, default=THREADS)
    args = parser.parse_args()
    model = QUICK if args.quick else FULL
    repetitions = args.repetitions or (1 if args.quick else 3)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        facts = measure(Path(folder), model, repetitions=repetitions, workers=args.workers)
    print(json.dumps({"quick": args.quick, "repetitions": repetitions, **facts}))
    return 0


def measure(root: Path, model: Model, *, repetitions: int, workers: int) -> dict[str, Any]:
    """Let all take turns; print a table and return its facts."""
    times: dict[str, list[float]] = {}
    peaks: list[float] = []

    def timed(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)
        print(f"{name:<24} {seconds:8.2f} s", flush=True)

    whole = root / "whole"
    foreign = deepspeed_checkpoint(root / "deepspeed", model)
    for _ in range(repetitions):
        for name in ("whole", "copy", "a", "b", "universal"):
            shutil.rmtree(root / name, ignore_errors=True)
        timed("save", save(whole, model))
        size = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
        warm(whole)
        timed("cp + fsync", clock(lambda: copy(whole, root / "copy")))
        timed("load", load(whole, model))
        source = whole / "global_step1"
        for name, tp, pp in (("a", 2, 2), ("b", 4, 1)):
            warm(source)
            told = reshard_apart(source, root / name, tp, pp, workers)
            source = root / name / "global_step1"
            timed(f"reshard to tp{tp} pp{pp}", told["seconds"])
            shard = max(file.bytes for file in Manifest.read(source).files.values())
            peaks.append(told["rss"] / shard)
        warm(foreign)
        timed("ds_to_universal", clock(lambda: to_universal(foreign, root / "universal")))
    found = {name: median(values) for name, values in times.items()}
    resharding = [found["reshard to tp2 pp2"], found["reshard to tp4 pp1"]]
    print(f"{size / 1e9:.2f} GB, {workers} threads; {plan_line(whole)}")
    return {
        "reshard_vs_cp": round(found["cp + fsync"] / max(resharding), 3),
        "reshard_vs_ds_to_universal": round(found["ds_to_universal"] / max(resharding), 2),
        "peak_rss_over_shard": round(max(peaks), 3),
        "save_gb_s": round(size / found["save"] / 1e9, 3),
        "load_gb_s": round(size / found["load"] / 1e9, 3),
        "cp_gb_s": round(size / found["cp + fsync"] / 1e9, 3),
        "reshard_seconds": [round(seconds, 2) for seconds in resharding],
        "ds_to_universal_seconds": round(found["ds_to_universal"], 2),
        "gb": round(size / 1e9, 3),
    }


def plan_line(root: Path) -> str:
    """How large the largest shard of each target is."""
    manifest = Manifest.read(root / "global_step1")
    largest = [
        max(shard.numel for shard in plan(manifest, Target(tp=tp, pp=pp)).shards) * 4 / 1e6
        for tp, pp in ((2, 2), (4, 1))
    ]
    return f"largest shards {largest[0]:.0f} and {largest[1]:.0f} MB"


def clock(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy(source: Path, target: Path) -> None:
    """The limit: the same bytes by `cp`, then on the disk."""
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in target.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def warm(folder: Path) -> None:
    """Read all files, so that everyone finds its input in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def reshard_apart(source: Path, root: Path, tp: int, pp: int, workers: int) -> dict[str, float]:
    """Reshard in a process of its own, which tells its time and the memory above its imports."""
    command = [sys.executable, "-c", RESHARD, source, root, *map(str, (tp, pp, workers))]
    told: dict[str, float] = json.loads(call(command))
    return told


def call(command: list[Any]) -> str:
    """Run a command; returns what it prints, and shows what it says if it fails."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr}")
    return done.stdout


def deepspeed_checkpoint(root: Path, model: Model) -> Path:
    """A checkpoint of DeepSpeed's own of the same model."""
    command = [sys.executable, HERE / "checkpoint_work.py", root, model.name]
    call(command)
    return root / (root / "latest").read_text().strip()


def to_universal(source: Path, target: Path) -> None:
    """What DeepSpeed offers for changing a layout; it only takes apart."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--inject_missing_state"]
    call(command)


if __name__ == "__main__":
    sys.exit(main())
