"""What a checkpoint holds, whether every byte is what was written, and where two differ."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from megatron_lite.checkpoint.direct import THREADS
from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.fingerprint import Fingerprints
from megatron_lite.checkpoint.inspection import (
    describe,
    differences,
    differing_tensors,
    first_difference,
    listing,
    locate,
)
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.scan import Scan, scan, uncovered
from megatron_lite.command import run_tool
from megatron_lite.mpu.host_memory import share_one_arena


class Unequal(Exception):
    """The answer is no: damaged, or not the same."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the checkpoints, or of one step")
    parser.add_argument("--step", type=int, help="default: the latest")
    parser.add_argument("--list", action="store_true", help="a line for each logical tensor")
    parser.add_argument(
        "--verify", action="store_true", help="read all files and compare their checksums"
    )
    parser.add_argument(
        "--hash",
        action="store_true",
        help="hash each state of each logical tensor, whatever its layout; ends with one hash of "
        "them all",
    )
    parser.add_argument(
        "--diff", type=Path, metavar="FOLDER", help="compare with another checkpoint; 1 if unequal"
    )
    parser.add_argument("--diff-step", type=int, help="step of the other one; default: the latest")
    return parser.parse_args()


def main() -> None:
    """Print what was asked for."""
    args = parse()
    folder = locate(args.folder, args.step)
    manifest = Manifest.read(folder)
    for line in describe(folder, manifest):
        print(line)
    if args.list:
        for line in listing(manifest):
            print(line)
    if not (args.verify or args.hash or args.diff):
        return
    found = read(folder, manifest)
    if args.hash:
        for line in found.fingerprints.lines():
            print(line)
        print(f"total {found.fingerprints.total()}")
    require_whole(manifest, found)
    if args.verify:
        count = len(manifest.files | manifest.texts)
        print(f"verified: {count} files are what was written")
    if args.diff:
        compare((folder, manifest), found, locate(args.diff, args.diff_step))


def require_whole(manifest: Manifest, found: Scan) -> None:
    """Unequal where a checkpoint does not hold what was written."""
    if faults := [*found.faults, *uncovered(manifest), *other_numbers(manifest, found)]:
        raise Unequal("damaged:\n  " + "\n  ".join(faults))


def other_numbers(manifest: Manifest, found: Scan) -> list[str]:
    """A line for each state of a tensor that is not what was saved; for some with all files well,
    since the manifest itself may have been changed."""
    if not manifest.fingerprints or found.faults:
        return []
    wrong = Fingerprints(manifest.fingerprints).differing(found.fingerprints)
    return [f"{tensor} ({state}): not the numbers that were saved" for tensor, state in wrong]


def read(folder: Path, manifest: Manifest) -> Scan:
    """Read every byte of a checkpoint."""
    with tqdm(
        total=manifest.bytes, unit="B", unit_scale=True, desc=folder.name, leave=False
    ) as bar:
        return scan(
            folder,
            manifest.boxes,
            files=manifest.files | manifest.texts,
            workers=THREADS,
            progress=bar.update,
        )


def compare(one: tuple[Path, Manifest], found: Scan, folder: Path) -> None:
    """Print where another checkpoint differs; Unequal if it does."""
    other = (folder, Manifest.read(folder))
    scanned = read(*other)
    require_whole(other[1], scanned)
    lines = list(differences(one[1], other[1]))
    pairs = differing_tensors(found.fingerprints, scanned.fingerprints)
    if pairs:
        lines += [f"numbers of {tensor} ({state}) differ" for tensor, state in pairs[1:]]
        if not any(line.startswith(f"tensor {pairs[0][0]}: shape") for line in lines):
            lines.append(first_difference(*pairs[0], one, other))
    if lines:
        raise Unequal(f"{one[0]} | {folder}\n  " + "\n  ".join(lines))
    print(f"equal to {folder}")


if __name__ == "__main__":
    share_one_arena()
    sys.exit(run_tool(main, refused=CheckpointError, failed=(Unequal,)))
