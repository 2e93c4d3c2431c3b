"""The tools as a person calls them: output, exit codes, memory, and what a kill leaves."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.reshard import Target, plan
from tests.checkpoints import Made, Shape, assert_equal, make, read

ROOT = Path(__file__).resolve().parents[3]


def call(tool: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / f"tools/{tool}_checkpoint.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def sizes(tp: int, pp: int) -> list[object]:
    return ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("made"), tp=2, pp=2)


def test_reshard_tells_what_it_does_and_proves_it(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "new"
    command = ["--load", made.root, "--save", target, *sizes(1, 4)]
    dry = call("reshard", *command, "--dry-run")
    assert dry.returncode == 0 and not target.exists()
    assert "tensor 1 x pipeline 4 x data 1, 4 files" in dry.stdout
    assert "drops rng_00003.safetensors: random streams of the old layout" in dry.stdout
    done = call("reshard", *command)
    assert done.returncode == 0 and dry.stdout in done.stdout
    assert_equal(read(target / "global_step7"), made.arrays)
    hashes = [call("inspect", root, "--hash").stdout.splitlines() for root in (made.root, target)]
    assert hashes[0][-1] == hashes[1][-1] and len(hashes[0][-1].split()[1]) == 32
    assert hashes[0][-1].startswith("total ") and hashes[0][-1].split()[1] in done.stdout
    assert [x for x in hashes[0] if "exp_avg" in x] == [x for x in hashes[1] if "exp_avg" in x]
    again = call("reshard", *command)
    assert again.returncode == 2 and "exists; remove it first" in again.stderr


def test_a_small_release_checkpoint(made: Made, tmp_path: Path) -> None:
    flags = ["--weights-only", "--dtype", "bf16"]
    done = call("reshard", "--load", made.root, "--save", tmp_path, *sizes(1, 1), *flags)
    assert done.returncode == 0 and "(bfloat16)" in done.stdout
    small = sum(path.stat().st_size for path in (tmp_path / "global_step7").glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in made.folder.glob("shard*"))
    assert small < 0.25 * whole
    told = call("inspect", tmp_path, "--verify")
    assert told.returncode == 0 and "weight (bfloat16)" in told.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([*sizes(3, 1)], "can't be cut into 3"),
        ([*sizes(1, 9)], "cannot be balanced over 9"),
        ([*sizes(1, 1), "--dtype", "bf16"], "is for weights alone"),
        ([*sizes(1, 1), "--step", 3], "no checkpoint of step 3; steps there: 7"),
        ([*sizes(0, 1)], "0 is not at least 1"),
    ],
)
def test_bad_input_to_reshard(flags: list[object], told: str, made: Made, tmp_path: Path) -> None:
    done = call("reshard", "--load", made.root, "--save", tmp_path / "new", *flags)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_inspect_describes(made: Made) -> None:
    told = call("inspect", made.root, "--list")
    assert told.returncode == 0
    assert "step        7" in told.stdout and "tp 2 x dp 1 x pp 2" in told.stdout
    assert "layers.3.mlp.down.weight" in told.stdout and "cut along 1" in told.stdout
    assert call("inspect", made.folder).stdout.splitlines() == told.stdout.splitlines()[:9]
    for args, what in [
        ((made.root / "gone",), "no such folder"),
        ((made.root, "--step", 9), "steps there: 7"),
    ]:
        wrong = call("inspect", *args)
        assert wrong.returncode == 2 and what in wrong.stderr


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("shard_00001.safetensors", lambda raw: raw[:-9] + b"X" + raw[-8:], "bytes have changed"),
        ("shard_00001.safetensors", lambda raw: raw[:-9], "its tensors end at"),
        ("config.json", lambda raw: raw.replace(b"2", b"1"), "bytes have changed"),
        ("origins.json", None, "missing"),
        ("rng_00001.safetensors", lambda raw: raw[:-1], "bytes, "),
        ("shard_00003.safetensors", None, "missing"),
        ("manifest.json", lambda raw: raw[:100], "damaged"),
        ("manifest.json", None, "missing; the checkpoint is not whole"),
        (
            "manifest.json",
            lambda raw: raw.replace(b'"format_version": 1', b'"format_version": 9'),
            "format version 9 is newer than 1",
        ),
        (
            "manifest.json",
            lambda raw: raw.replace(b'"offset": [4,', b'"offset": [5,', 1),
            "its checksum is another",
        ),
    ],
)
def test_verify_names_what_is_damaged(
    file: str, change: object, told: str, made: Made, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made.root, copy)
    path = copy / "global_step7" / file
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    found = call("inspect", copy, "--verify")
    assert found.returncode in (1, 2) and told in found.stderr, found.stderr
    assert file in found.stderr and "Traceback" not in found.stderr


def test_verify_does_not_trust_a_manifest_that_fits_its_files(tmp_path: Path) -> None:
    """What was in memory when it was saved is the judge."""
    made = make(tmp_path, proof=True)
    rewrite(made, made.arrays | {("final_norm.weight", "fp32"): np.ones(16, np.float32)})
    found = call("inspect", made.root, "--verify")
    assert found.returncode == 1
    assert "final_norm.weight (fp32): not the numbers that were saved" in found.stderr


def test_diff_names_the_first_difference(made: Made, tmp_path: Path) -> None:
    call("reshard", "--load", made.root, "--save", tmp_path / "same", *sizes(4, 1))
    same = call("inspect", made.root, "--diff", tmp_path / "same")
    assert same.returncode == 0 and "equal to" in same.stdout
    other = make(tmp_path / "other", step=7, tp=1, seed=0, proof=False)
    changed = dict(other.arrays)
    changed["layers.1.attention.output.weight", "exp_avg"][2, 5] += 0.5
    changed["layers.2.attention.output.weight", "fp32"][0, 0] = 9.0
    rewrite(other, changed)
    told = call("inspect", made.root, "--diff", other.root)
    assert told.returncode == 1
    first = "(exp_avg): 1 numbers differ, by at most 0.5; first at [2, 5]"
    assert f"layers.1.attention.output.weight {first}" in told.stderr
    assert "numbers of layers.2.attention.output.weight (fp32) differ" in told.stderr
    smaller = make(tmp_path / "smaller", Shape(layers=3), step=6)
    told = call("inspect", made.root, "--diff", smaller.root)
    assert told.returncode == 1 and "progress.iteration: 7 | 6" in told.stderr
    assert "tensor layers.3.mlp.down.weight: shape (16, 32) | None" in told.stderr


def test_diff_of_what_is_not_whole_or_of_another_dtype(made: Made, tmp_path: Path) -> None:
    half = make(tmp_path / "half", seed=0, pp=2)
    there = [box for box in half.manifest.boxes if box.file == "shard_00000.safetensors"]
    replace(half.manifest, boxes=there).write(half.folder)
    for one, other in ((made.root, half.root), (half.root, made.root)):
        told = call("inspect", one, "--diff", other)
        assert told.returncode == 1 and "the boxes hold 0 of" in told.stderr
    wide = make(tmp_path / "wide", Shape(layers=1, hidden=64, vocabulary=20000, padded=20000))
    for dtype in ("bf16", "fp32"):
        release = ["--weights-only", "--dtype", dtype, *sizes(1, 1)]
        call("reshard", "--load", wide.root, "--save", tmp_path / dtype, *release)
    told = call("inspect", tmp_path / "bf16", "--diff", tmp_path / "fp32")
    assert told.returncode == 1 and "Traceback" not in told.stderr
    assert "embedding.position_embeddings.weight (weight): 3" in told.stderr
    broken = make(tmp_path / "broken")
    values = broken.arrays["final_norm.weight", "fp32"].copy()
    values[3] = np.nan
    broken = make(tmp_path / "nan", proof=False)
    rewrite(broken, broken.arrays | {("final_norm.weight", "fp32"): values})
    told = call("inspect", made.root, "--diff", broken.root)
    assert "(fp32): 1 numbers differ, by at most nan; first at [3]" in told.stderr


def rewrite(made: Made, arrays: dict[tuple[str, str], np.ndarray]) -> None:
    """Write other numbers into a checkpoint of one shard, as if they had been saved."""
    from safetensors.numpy import save_file

    from megatron_lite.checkpoint.scan import file_facts

    manifest = made.manifest
    held = {box.key: arrays[box.tensor, box.state] for box in manifest.boxes}
    save_file(held, made.folder / "shard_00000.safetensors")
    facts = {"shard_00000.safetensors": file_facts(made.folder / "shard_00000.safetensors")}
    replace(manifest, files=manifest.files | facts).write(made.folder)


LIMITED = """
import resource, sys
sys.argv = sys.argv[1:]
import runpy
import numpy, tqdm, xxhash
import megatron_lite.checkpoint.inspection, megatron_lite.checkpoint.reshard
def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used() + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """About 0.5 GB in one file."""
    shape = Shape(layers=4, hidden=1024, vocabulary=12000, padded=12032)
    return make(tmp_path_factory.mktemp("large"), shape)


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (4, 2), (1, 4)])
def test_memory_is_bounded_by_a_shard(tp: int, pp: int, large: Made, tmp_path: Path) -> None:
    """Address space: 1.5 of the largest target shard + 300 MB beyond the imports."""
    shards = plan(large.manifest, Target(tp=tp, pp=pp)).shards
    shard = max(4 * shard.numel for shard in shards)
    whole = large.manifest.files["shard_00000.safetensors"].bytes
    allowed = int(1.5 * shard + 300e6)
    assert len(shards) >= 4 and whole > 0.6 * allowed
    tool = [ROOT / "tools/reshard_checkpoint.py", allowed]
    command = [sys.executable, "-c", LIMITED, *tool, "--load", large.root, "--save", tmp_path]
    done = subprocess.run(
        [*map(str, command), *map(str, sizes(tp, pp))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the same in" in done.stdout
    found = call("inspect", tmp_path, "--hash").stdout.splitlines()[-1]
    assert found.split()[1] in done.stdout


def test_kill_minus_nine_at_any_moment(large: Made, tmp_path: Path) -> None:
    """Killed 8 times; the last run goes on from what is there and proves the whole."""
    command = [sys.executable, ROOT / "tools/reshard_checkpoint.py", "--load", large.root]
    command = [*map(str, [*command, "--save", tmp_path, *sizes(4, 2), "--workers", 1])]
    kept = set()
    moments = random.Random(1)
    for _ in range(8):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.3, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not (tmp_path / ".global_step7.tmp").exists():
            continue
        assert not (tmp_path / "latest").exists()
        kept |= {path.name for path in (tmp_path / ".global_step7.tmp").glob("shard_*.safetensors")}
        if len(kept) > 5:
            break
    assert kept, "no kill came while shards were there"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert call("inspect", tmp_path, "--verify").returncode == 0
    manifest = Manifest.read(tmp_path / "global_step7")
    assert manifest.fingerprints == large.manifest.fingerprints
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "global_step7"}


def test_a_full_disk_is_told(large: Made, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))

    command = [sys.executable, ROOT / "tools/reshard_checkpoint.py", "--load", large.root]
    done = subprocess.run(
        [*map(str, command), *map(str, ["--save", tmp_path, *sizes(2, 2)])],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 2 and "File too large" in done.stderr
    assert "the same command goes on from here" in done.stderr
    assert not (tmp_path / "latest").exists()
