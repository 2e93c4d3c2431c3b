"""Speed of a training step beside its peers: Hugging Face's LLaMA, bare PyTorch, tensor parallel.

`python tests/benchmarks/train_step.py [--quick]`. Everyone trains the same network in bf16:
forward, backward, clipping, AdamW. Each contestant is a process of its own; they take turns step by
step, so that whatever else the machine does meets all of them alike. Needs about 11 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from processes import Contestant
from work import QUICK, SHAPES, Shape, write_run

from megatron_lite.config.load import load_config
from megatron_lite.monitoring.throughput import model_flops_per_token

WARM_UP = 2
"""Steps before the measured ones; the first one compiles."""
NOTES = """\
What runs how, and why:
  Hugging Face and plain PyTorch: weights, gradients and AdamW's moments in bf16, fused AdamW,
    SDPA. It is their fastest way (autocast over fp32 weights casts them in every step); they keep
    no fp32 master. Their logits are float32 for the loss: the library does it so, and the loss of
    32,000 words in bf16 would have two digits.
  megatron_lite: its trainer on a config with ZeRO-1, fp32 master and moments, clipping. The ratios
    are of `training.compile: true`, what a long run sets; its cost is shown, and the eager step
    beside it.
  Peers are not compiled, as their users mostly run them; plain PyTorch under torch.compile is shown
    too."""


@dataclass
class Lane:
    """A contestant's measurements."""

    contestant: Contestant
    threads: int
    first: float = 0.0
    """Seconds of the first step, compilation included."""
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def main(argv: list[str] | None = None) -> int:
    """Run both sizes; the last line of the output is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, three repetitions: shows that it runs, and no speed",
    )
    parser.add_argument("--repetitions", type=int, help="measured steps of each (default: 9)")
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=2, help="of a lone process (default: 2)")
    args = parser.parse_args(argv)
    repetitions = args.repetitions or (3 if args.quick else 9)
    print(NOTES)
    facts: dict[str, Any] = {"quick": args.quick, "repetitions": repetitions}
    for size in args.sizes:
        shape = (QUICK if args.quick else SHAPES)[size]
        facts |= measure(
            size, shape, repetitions=repetitions, threads=args.threads, quick=args.quick
        )
    print(json.dumps(facts))
    return 0


def measure(
    size: str, shape: Shape, *, repetitions: int, threads: int, quick: bool
) -> dict[str, Any]:
    """Let all contestants of one size take turns; print the table and return its facts."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_run(shape, folder)
        lanes = {
            lane.contestant.name: lane
            for lane in contestants(size, shape, folder, threads=threads, quick=quick, stack=stack)
        }
        for lane in lanes.values():
            lane.first = lane.contestant.step()
            for _ in range(WARM_UP - 1):
                lane.contestant.step()
        peaks = [take_turns(list(lanes.values()), turn) for turn in range(repetitions)]
        for lane in lanes.values():
            lane.peak_bytes = lane.contestant.peak_bytes()
        config = load_config(folder / "config.json", world_size=1).config
    flops = model_flops_per_token(config.model, vocab_size=shape.vocab)
    facts = summarise(size, shape, lanes, flops_per_token=flops, peak_tflops=max(peaks))
    print_table(size, shape, lanes, facts)
    return facts


def contestants(
    size: str, shape: Shape, folder: Path, *, threads: int, quick: bool, stack: ExitStack
) -> list[Lane]:
    """Start the processes. All are in memory at once, so what is beyond the question of the large
    size runs at the small one only."""
    lanes = []

    def start(name: str, program: str, *, ranks: int = 1, compiled: bool = False) -> None:
        each = threads // ranks
        contestant = Contestant(
            name,
            program,
            shape,
            folder,
            threads=each,
            ranks=ranks,
            compiled=compiled,
            empty_cache=not quick,
        )
        lanes.append(Lane(stack.enter_context(contestant), each))

    start("ours", "ours", compiled=True)
    start("hf", "hugging_face")
    start("plain", "plain")
    if size == "30m":
        start("ours_eager", "ours")
        start("tp2", "ours", ranks=2, compiled=True)
        if not quick:
            start("plain_compiled", "plain", compiled=True)
    return lanes


def take_turns(lanes: list[Lane], turn: int) -> float:
    """One measured step of each, in an order that rotates; returns the matmul TFLOP/s between."""
    first = turn % len(lanes)
    for lane in lanes[first:] + lanes[:first]:
        lane.seconds.append(lane.contestant.step())
    [answer] = lanes[0].contestant.ask("matmul")
    return float(answer["tflops"])


def summarise(
    size: str,
    shape: Shape,
    lanes: dict[str, Lane],
    *,
    flops_per_token: int,
    peak_tflops: float,
) -> dict[str, Any]:
    """Medians, pairwise ratios (tokens/s of the first over the second's) and peak memory."""
    speed = {name: shape.tokens / median(lane.seconds) for name, lane in lanes.items()}
    ours, plain = lanes["ours"], lanes["plain"]
    facts: dict[str, Any] = {
        f"ratio_{name}_{size}": ratio(ours, lanes[name])
        for name in ("hf", "plain", "plain_compiled")
        if name in lanes
    }
    if "tp2" in lanes:
        facts[f"ratio_eager_plain_{size}"] = ratio(lanes["ours_eager"], plain)
        facts[f"ratio_tp2_{size}"] = ratio(lanes["tp2"], ours)
    over = (ours.peak_bytes - plain.peak_bytes) / shape.parameters
    return facts | {
        f"tokens_per_second_{size}": {name: round(value, 1) for name, value in speed.items()},
        f"peak_mib_{size}": {name: lane.peak_bytes >> 20 for name, lane in lanes.items()},
        f"memory_over_plain_bytes_per_parameter_{size}": round(over, 2),
        f"compile_seconds_{size}": round(ours.first - median(ours.seconds), 1),
        f"matmul_tflops_{size}": round(peak_tflops, 3),
        f"mfu_{size}": round(speed["ours"] * flops_per_token / peak_tflops / 1e12, 4),
    }


def ratio(first: Lane, second: Lane) -> float:
    """Median over the repetitions of how many times faster `first` was than `second`."""
    pairs = zip(first.seconds, second.seconds, strict=True)
    return round(median(theirs / mine for mine, theirs in pairs), 3)


def print_table(size: str, shape: Shape, lanes: dict[str, Lane], facts: dict[str, Any]) -> None:
    """The facts for people."""
    print(
        f"\n{size}: {shape.parameters / 1e6:.1f} M parameters, {shape.layers} layers, hidden "
        f"{shape.hidden}, vocabulary {shape.vocab}, {shape.micro_batch_size} x {shape.seq_length} "
        f"tokens a step; bf16 matmul {facts[f'matmul_tflops_{size}']:.2f} TFLOP/s"
    )
    print(
        f"{'':16}{'threads':>9}{'ms':>8}{'tokens/s':>10}{'ours is':>9}{'peak MiB':>10}"
        f"{'1st step s':>12}"
    )
    for name, lane in lanes.items():
        threads = f"{lane.contestant.ranks} x {lane.threads}"
        print(
            f"{name:16}{threads:>9}{1e3 * median(lane.seconds):8.0f}"
            f"{shape.tokens / median(lane.seconds):10.0f}{ratio(lanes['ours'], lane):8.2f}x"
            f"{lane.peak_bytes >> 20:10d}{lane.first:12.1f}"
        )
    print(
        f"ours: compiling took {facts[f'compile_seconds_{size}']:.0f} s; MFU "
        f"{facts[f'mfu_{size}']:.1%}; memory over plain "
        f"{facts[f'memory_over_plain_bytes_per_parameter_{size}']:.1f} bytes a parameter"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
