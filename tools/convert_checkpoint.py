"""Convert checkpoints of DeepSpeed and Megatron-LM to ours, and ours to DeepSpeed's.

--from deepspeed     engine.save_checkpoint's folder (global_stepN, latest) of ZeRO stage 1 or 2,
                     any data-parallel size, around Hugging Face's LlamaForCausalLM (GQA, tied or
                     not) or GPT2LMHeadModel: weights, Adam's moments, step, position
--from megatron      Megatron-LM's legacy folder (iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt,
                     latest_checkpointed_iteration.txt), checkpoint version 3.0, legacy or mcore
                     names, any tensor x pipeline size, dense GPT and LLaMA: weights only
--to deepspeed-universal
                     a folder for {"checkpoint": {"load_universal": true}} around the same
                     Hugging Face models: weights, Adam's moments, step, position

--config is the run config of the model that is imported; the source is checked against it.
DeepSpeed's folder says shapes only: --hugging-face-config compares heads, RoPE base, norm epsilon.
An export has a config.json to make the Hugging Face model from; a loss scale starts anew.
No file can run code: anything but tensors, numbers, text and a few known classes is refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.inspection import locate
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.command import run_tool
from megatron_lite.convert import foreign, megatron, universal, zero
from megatron_lite.convert.hugging_face_config import check
from megatron_lite.convert.target import Target

READERS = {"deepspeed": zero.read, "megatron": megatron.read}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--from", dest="source", choices=READERS, help="what --load holds")
    way.add_argument("--to", choices=["deepspeed-universal"], help="what --save will hold")
    parser.add_argument("--load", type=Path, required=True, help="folder with checkpoints")
    parser.add_argument("--step", type=int, help="default: the latest")
    parser.add_argument("--save", type=Path, required=True, help="folder for the result")
    parser.add_argument("--config", type=Path, help="run config (JSON); needed with --from")
    parser.add_argument(
        "--hugging-face-config",
        type=Path,
        metavar="CONFIG.JSON",
        help="config.json of the model that DeepSpeed trained",
    )
    args = parser.parse_args()
    if (args.source is None) != (args.config is None):
        parser.error("--from needs --config, --to has no use for it")
    if args.source is None and args.hugging_face_config is not None:
        parser.error("--to writes a config.json and compares with none: no --hugging-face-config")
    return args


def main() -> None:
    """Import or export."""
    args = parse()
    if args.source is None:
        export(args)
        return
    target = Target.read(args.config)
    if args.hugging_face_config is not None:
        check(args.hugging_face_config, target.model, vocab_size=target.vocab_size)
    found = READERS[args.source](args.load, target, step=args.step)
    for note in found.notes:
        print(f"note  {note}")
    with tqdm(
        total=foreign.size(target, found), unit="B", unit_scale=True, desc="write", disable=None
    ) as bar:
        folder = foreign.write(args.save, target, found, progress=bar.update)
    print(f"{found.folder} -> {folder}: {len(target.table)} tensors, {', '.join(found.states)}")


def export(args: argparse.Namespace) -> None:
    """Ours to DeepSpeed's."""
    source = locate(args.load, args.step)
    total = universal.size(Manifest.read(source))
    with tqdm(total=total, unit="B", unit_scale=True, desc="write", disable=None) as bar:
        folder = universal.export(source, args.save, progress=bar.update)
    print(f"{source} -> {folder}; load it with checkpoint.load_universal true, tag {folder.name}")


if __name__ == "__main__":
    sys.exit(run_tool(main, refused=CheckpointError))
