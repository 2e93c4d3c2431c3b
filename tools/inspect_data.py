"""Describe a .bin/.idx pair, compare two, or name the documents of an iteration of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.command import run_tool
from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import LoadedConfig, load_config, resolved_dict
from megatron_lite.config.resuming import SavedRun, resume_config
from megatron_lite.data.errors import DataError
from megatron_lite.data.inspection import check, describe, differences
from megatron_lite.data.provenance import which_documents
from megatron_lite.data.tokenizer import named_tokenizer
from megatron_lite.data.tool_runner import add_tokenizer_flags
from megatron_lite.data.training_order import in_other_data
from megatron_lite.progress import Progress

_EPILOG = """A run that went on from a checkpoint with other weights or ranges to leave out needs
--load, the folder of its checkpoints: the newest one before the iteration tells where it stood."""


class Unequal(Exception):
    """The answer is no: not the same."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EPILOG)
    parser.add_argument("prefix", nargs="?", help="path without .bin or .idx")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="show the start of the first N documents"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail on empty documents, on token ids that the tokenizer or --vocab-size does not "
        "have, and on documents without end where most have one",
    )
    parser.add_argument(
        "--diff", metavar="PREFIX", help="compare with another pair; exit code 1 if they differ"
    )
    add_tokenizer_flags(parser, required=False)
    run = parser.add_argument_group("documents of an iteration")
    run.add_argument("--which-documents", metavar="CONFIG", help="the run's config file")
    run.add_argument("--iteration", type=int, metavar="N", help="of which; the first is 1")
    run.add_argument("--load", type=Path, metavar="DIR", help="the run's checkpoints")
    run.add_argument(
        "--set", action="append", default=[], metavar="section.key=JSON", help="as for training"
    )
    options = parser.parse_args()
    if (options.prefix is None) == (options.which_documents is None):
        parser.error("give a prefix, or --which-documents CONFIG --iteration N")
    if options.which_documents is not None and options.iteration is None:
        parser.error("--which-documents needs --iteration N")
    if fault := _without_effect(options):
        parser.error(fault)
    return options


def _without_effect(options: argparse.Namespace) -> str | None:
    """Options that the question asked has no use for."""
    of_a_pair = (options.show, options.check, options.diff, options.tokenizer_type)
    of_a_run = (options.iteration is not None, options.load, options.set)
    if options.which_documents is not None and any(of_a_pair):
        return "--show, --check, --diff and a tokenizer are for a prefix"
    if options.prefix is not None and any(of_a_run):
        return "--iteration, --load and --set are for --which-documents"
    if options.tokenizer_type is None and any(
        (options.tokenizer_model, options.vocab_file, options.merge_file)
    ):
        return "a tokenizer's files need --tokenizer-type"
    return None


def main() -> None:
    """Print what was asked for."""
    options = _parse()
    if options.which_documents is None:
        _inspect(options)
        return
    loaded, progress = _run_before(options)
    for line in which_documents(
        loaded.config, progress, iteration=options.iteration, dp=loaded.data_parallel_size
    ):
        print(line)


def _inspect(options: argparse.Namespace) -> None:
    tokenizer = None
    if options.tokenizer_type is not None:
        tokenizer = named_tokenizer(options, vocab_size=options.vocab_size)
    for line in describe(options.prefix, show=options.show, tokenizer=tokenizer):
        print(line)
    if options.check:
        known: dict[str, Any] = {"vocab_size": options.vocab_size}
        if tokenizer is not None:
            known = {"vocab_size": options.vocab_size or tokenizer.vocab_size, "eod": tokenizer.eod}
        check(options.prefix, **known)
        print("check        passed")
    if options.diff is not None:
        if lines := list(differences(options.prefix, options.diff)):
            raise Unequal("\n  ".join([f"{options.prefix} | {options.diff}", *lines]))
        print(f"equal to {options.diff}")


def _run_before(options: argparse.Namespace) -> tuple[LoadedConfig, Progress]:
    """The config, and where the run stood at its newest checkpoint before the iteration."""
    path, overrides = options.which_documents, options.set
    try:
        if options.load is None:
            return load_config(path, overrides), Progress()
        earlier = [step for step in store.steps(options.load) if step < options.iteration]
        if not earlier:
            raise DataError(f"{options.load}: no checkpoint before iteration {options.iteration}")
        folder = store.step_folder(options.load, earlier[-1])
        saved, origins = store.read_config(folder)
        loaded = resume_config(
            path,
            overrides,
            None,
            check_files=False,
            saved=SavedRun(folder.name, saved, origins),
        )
        progress = Progress(**Manifest.read(folder).progress)
        choice = loaded.config.checkpoint.changed_data
        for line in in_other_data(progress, saved, resolved_dict(loaded.config), choice):
            print(line)
        return loaded, progress
    except (ConfigError, CheckpointError) as error:
        raise DataError(str(error)) from error


if __name__ == "__main__":
    sys.exit(run_tool(main, refused=DataError, failed=(Unequal,)))
