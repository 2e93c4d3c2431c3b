"""Rewrite a checkpoint for another layout, with a proof that it holds the same.

Peak memory does not grow with the model; killed, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from megatron_lite.checkpoint.direct import THREADS
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.inspection import locate
from megatron_lite.checkpoint.manifest import CODES, Manifest
from megatron_lite.checkpoint.reshard import Plan, Target, plan, reshard
from megatron_lite.command import run_tool
from megatron_lite.mpu.host_memory import share_one_arena

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=Path, required=True, help="folder with checkpoints")
    parser.add_argument("--step", type=int, help="default: the latest")
    parser.add_argument("--save", type=Path, required=True, help="folder for the new checkpoint")
    parser.add_argument("--tensor-model-parallel-size", type=positive, required=True, metavar="T")
    parser.add_argument("--pipeline-model-parallel-size", type=positive, required=True, metavar="P")
    parser.add_argument("--data-parallel-size", type=positive, default=1, metavar="D")
    parser.add_argument(
        "--pipeline-model-parallel-layout",
        type=int,
        nargs="+",
        metavar="LAYERS",
        help="transformer layers of each stage; default: as even as possible",
    )
    parser.add_argument("--weights-only", action="store_true", help="no optimizer: for release")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; needs --weights-only")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, only")
    parser.add_argument("--workers", type=positive, default=THREADS, help="threads")
    return parser.parse_args()


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def main() -> None:
    """Plan, tell, rewrite, prove."""
    args = parse()
    source = locate(args.load, args.step)
    manifest = Manifest.read(source)
    layers = args.pipeline_model_parallel_layout
    target = Target(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=args.data_parallel_size,
        layers=None if layers is None else tuple(layers),
        weights_only=args.weights_only,
        dtype=manifest.dtype if args.dtype is None else DTYPES[args.dtype],
    )
    planned = plan(manifest, target)
    describe(source, args.save, planned)
    if args.dry_run:
        return
    total = manifest.bytes + 2 * planned.bytes
    with tqdm(total=total, unit="B", unit_scale=True, desc="read, write, read again") as bar:
        folder, found = reshard(
            source, args.save, planned, workers=args.workers, progress=bar.update
        )
    print(f"total {found.total()}, the same in {source} and {folder}")


def describe(source: Path, save: Path, planned: Plan) -> None:
    """Say what is written and what is not."""
    target, manifest = planned.target, planned.source
    print(f"from  {source}: {manifest.saved_from}, {len(manifest.files)} files")
    print(
        f"to    {save}: tensor {target.tp} x pipeline {target.pp} x data {target.dp}, "
        f"{len(planned.shards)} files, {planned.bytes / 1e6:.1f} MB ({target.dtype})"
    )
    width = CODES[target.dtype]
    for shard in planned.shards:
        tensors = len({box.tensor for box in shard.boxes})
        print(f"      {shard.file}: {tensors} tensors, {shard.numel} numbers of {width}")
    for line in planned.dropped:
        print(f"drops {line}")


if __name__ == "__main__":
    share_one_arena()
    again = "interrupted; the same command goes on from here"
    sys.exit(run_tool(main, refused=CheckpointError, interrupted=again))
