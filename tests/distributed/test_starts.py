"""How a run starts from a checkpoint: weights alone, damage and fallback, other data, drift."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.scan import file_facts
from megatron_lite.checkpoint.tensor_file import TensorWriter
from megatron_lite.guard import TrainingStopped
from megatron_lite.report import Reporter
from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import logical_state, make_trainer, merged, train
from tests.distributed.small import layout, rows, small_config
from tests.distributed.test_reload import attempt, first_lines, on_disk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in fp32."""
    folder = tmp_path_factory.mktemp("starts")
    return small_config(folder / "run.json", corpus, training={"train_iters": 6})


@pytest.fixture(scope="module")
def saved(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2, 4 and 6 of a run with tensor 2 × data 1."""
    run_dir = tmp_path_factory.mktemp("saved")
    overrides = [*layout(2, 1), 'checkpoint.save="checkpoints"', "checkpoint.save_interval=2"]
    on_ranks(2, train, config, overrides, run_dir)
    return run_dir / "checkpoints"


def weights_after(
    config: Path, overrides: list[str], run_dir: Path
) -> tuple[list[str], dict[str, np.ndarray], dict[str, np.ndarray], tuple[int, int, int]]:
    """What a run says at its start; masters after all steps, moments before; counts before."""
    said: list[str] = []
    Reporter.say = lambda self, line: said.append(line)  # type: ignore[method-assign]
    trainer = make_trainer(config, overrides, run_dir)
    moments = logical_state(trainer.engine, "exp_avg")
    counts = (
        trainer.progress.iteration,
        trainer.progress.consumed_samples,
        trainer.engine.scalars()["optimizer_step"],
    )
    trainer.fit()
    masters = logical_state(trainer.engine, "fp32")
    trainer.report.close()
    trainer.engine.close()
    return said, masters, moments, counts


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "overrides",
    [layout(1, 1, zero=1), layout(1, 1, zero=2, offload="cpu"), layout(1, 1, zero=3)],
    ids=["zero1", "zero2-cpu", "zero3"],
)
def test_b38_masters_follow_loaded_weights(
    dtype: str, overrides: list[str], config: Path, saved: Path, tmp_path: Path
) -> None:
    """With rate 0 a step changes nothing: were the masters initial ones, it would."""
    start = [*overrides, f'checkpoint.load="{saved}"', "checkpoint.finetune=true"]
    still = ["optimizer.lr=1e-30", "optimizer.min_lr=0", "optimizer.weight_decay=0"]
    still += ["training.train_iters=1", f'precision.dtype="{dtype}"']
    parts = on_ranks(2, weights_after, config, [*start, *still], tmp_path)
    said, _, moments, counts = parts[0]
    assert counts == (0, 0, 0) and all(not np.nan_to_num(m).any() for m in moments.values())
    assert any("only weights were loaded" in line for line in said)
    assert any("schedule start at 0" in line for line in said)
    expected = on_disk(saved / "global_step6")["fp32"]
    for name, values in merged([part[1] for part in parts]).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_weights_of_a_release_start_a_run(config: Path, saved: Path, tmp_path: Path) -> None:
    """16-bit weights alone: not without saying so, and then exactly those."""
    tool = [sys.executable, ROOT / "tools/reshard_checkpoint.py", "--load", saved]
    flags = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2"]
    flags += ["--weights-only", "--dtype", "bf16", "--save", str(tmp_path / "release")]
    subprocess.run([*map(str, tool), *flags], check=True, capture_output=True)
    load = f'checkpoint.load="{tmp_path / "release"}"'
    ((_, error),) = on_ranks(1, attempt, config, [load], tmp_path)
    assert "holds weights alone: set checkpoint.finetune" in error
    start = [load, "checkpoint.finetune=true", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    start += ["optimizer.min_lr=0"]
    ((_, masters, _, _),) = on_ranks(1, weights_after, config, start, tmp_path)
    for name, values in on_disk(saved / "global_step6")["fp32"].items():
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
        np.testing.assert_array_equal(masters[name], rounded.view(np.float32), err_msg=name)


def test_going_on_without_the_optimizer(config: Path, saved: Path, tmp_path: Path) -> None:
    load = [f'checkpoint.load="{saved}"', "checkpoint.ckpt_step=4", "checkpoint.no_load_optim=true"]
    ((said, _, moments, counts),) = on_ranks(1, weights_after, config, load, tmp_path)
    assert counts == (4, 16, 0) and all(not m.any() for m in moments.values())
    assert any("only weights were loaded" in line for line in said)


def damage(root: Path, step: int, kind: str) -> Path:
    """Spoil a checkpoint; returns the file that must be named."""
    path = root / f"global_step{step}/shard_00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    if kind == "missing":
        path.unlink()
    elif kind.endswith(".json"):
        path = path.with_name(kind)
        text = path.read_text()
        path.write_text(text[: len(text) // 2])
    else:
        path.write_bytes(raw if kind == "flipped" else raw[:-10])
    return path


@pytest.mark.parametrize(
    "kind", ["flipped", "truncated", "missing", "manifest.json", "origins.json"]
)
def test_damage_is_named_and_older_ones_need_leave(
    kind: str, config: Path, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "c")
    path = damage(tmp_path / "c", 6, kind)
    load = f'checkpoint.load="{tmp_path / "c"}"'
    for iteration, error in on_ranks(2, attempt, config, [load], tmp_path):
        assert iteration == -1 and str(path) in error
        assert "checkpoint.fall_back_to_older" in error
    allowed = [load, "checkpoint.fall_back_to_older=true"]
    assert on_ranks(2, attempt, config, allowed, tmp_path) == [(4, "")] * 2
    for step in (2, 4):
        damage(tmp_path / "c", step, kind)
    for _, error in on_ranks(2, attempt, config, allowed, tmp_path):
        assert "no checkpoint is whole" in error and error.count("passed over") == 3


def test_checksums_are_compared_unless_that_is_switched_off(
    config: Path, saved: Path, tmp_path: Path
) -> None:
    """Another float is a float: nothing but a checksum tells."""
    shutil.copytree(saved, tmp_path / "c")
    damage(tmp_path / "c", 6, "flipped")
    load = [*layout(2, 1), f'checkpoint.load="{tmp_path / "c"}"']
    for _, error in on_ranks(2, attempt, config, load, tmp_path):
        assert "its bytes have changed" in error
    unverified = [*load, "checkpoint.verify_on_load=false"]
    assert on_ranks(2, attempt, config, unverified, tmp_path) == [(6, "")] * 2


def test_random_streams_are_left_where_that_is_asked_for(
    config: Path, saved: Path, tmp_path: Path
) -> None:
    load = [*layout(2, 1), f'checkpoint.load="{saved}"']
    (same, _), (anew, _) = (
        on_ranks(2, first_lines, config, overrides, tmp_path)
        for overrides in (load, [*load, "checkpoint.no_load_rng=true"])
    )
    assert any("random streams continued" in line for line in same[0])
    assert any("seeded anew, as asked for" in line for line in anew[0])
    assert same[1] != anew[1]


def test_b40_lenient_lists_what_is_missing(config: Path, saved: Path, tmp_path: Path) -> None:
    load = [f'checkpoint.load="{saved}"', "model.num_layers=3", "checkpoint.strict=false"]
    ((said, _),) = on_ranks(1, first_lines, config, load, tmp_path)
    assert sum("layers.2." in line and "not in the checkpoint" in line for line in said) >= 12


def other_data(config: Path, choice: str, saved: Path, run_dir: Path) -> tuple[int, int]:
    """Where in the data a run with another seed begins, and how many samples it has counted."""
    load = [f'checkpoint.load="{saved}"', "checkpoint.ckpt_step=4", "training.seed=99"]
    trainer = make_trainer(config, [*load, f'checkpoint.changed_data="{choice}"'], run_dir)
    trainer.report.close()
    trainer.engine.close()
    return trainer.progress.data_start, trainer.progress.consumed_samples


def test_b60_other_data_from_their_beginning(config: Path, saved: Path, tmp_path: Path) -> None:
    for choice, start in (("restart", 16), ("continue", 0)):
        assert on_ranks(1, other_data, config, choice, saved, tmp_path) == [(start, 16)]


def slow(trainer: Trainer) -> None:
    """Let writing take longer than a step."""
    import time

    write = TensorWriter.write

    def slowly(self: TensorWriter, values: np.ndarray) -> None:
        time.sleep(0.005)
        write(self, values)

    TensorWriter.write = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_an_asynchronous_save_holds_the_step_it_began_at(
    offload: str, config: Path, tmp_path: Path
) -> None:
    overrides = [*layout(2, 1, zero=2, offload=offload), "checkpoint.save_interval=2"]
    overrides += ['checkpoint.save="checkpoints"']
    for name, flag in (("a", "false"), ("b", "true")):
        (tmp_path / name).mkdir()
        extra = [f"checkpoint.async_save={flag}"]
        on_ranks(4, train, config, [*overrides, *extra], tmp_path / name, slow)
    for step in (2, 4, 6):
        one, other = (
            Manifest.read(tmp_path / name / f"checkpoints/global_step{step}") for name in "ab"
        )
        assert one.files == other.files and one.fingerprints == other.fingerprints
    saves = rows(tmp_path / "b", "save")
    assert [row["iteration"] for row in saves] == [2, 4, 6]
    assert all(0 < row["waited_ms"] <= row["elapsed_ms"] and row["bytes"] for row in saves)


def fails_once_asynchronously(config: Path, overrides: list[str], run_dir: Path) -> str:
    """What stops a run whose second save finds no space on rank 1."""

    def prepare(trainer: Trainer) -> None:
        write = TensorWriter.write

        def no_space(self: TensorWriter, values: np.ndarray) -> None:
            if trainer.progress.iteration > 3 and dist.get_rank() == 1:
                raise OSError(28, "No space left on device")
            write(self, values)

        TensorWriter.write = no_space  # type: ignore[method-assign]

    try:
        train(config, overrides, run_dir, prepare)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_failed_asynchronous_save_fails_the_run(config: Path, tmp_path: Path) -> None:
    overrides = ['checkpoint.save="checkpoints"', "checkpoint.save_interval=2"]
    overrides += ["checkpoint.async_save=true"]
    for error in on_ranks(2, fails_once_asynchronously, config, overrides, tmp_path):
        assert "No space left" in error
    assert (tmp_path / "checkpoints/latest").read_text() == "global_step2\n"
    assert on_disk(tmp_path / "checkpoints/global_step2")


def stops_while_saving(config: Path, overrides: list[str], run_dir: Path) -> str:
    """What stops a run just after the asynchronous save of step 4 began."""

    def prepare(trainer: Trainer) -> None:
        slow(trainer)
        iteration = trainer.iteration

        def stopping(total: int) -> None:
            if trainer.progress.iteration == 4:
                raise TrainingStopped("not finite")
            iteration(total)

        trainer.iteration = stopping  # type: ignore[method-assign]

    with pytest.raises(TrainingStopped, match="not finite"):
        train(config, overrides, run_dir, prepare)
    return (run_dir / "checkpoints/latest").read_text()


def test_a_save_on_its_way_is_finished_when_training_stops(config: Path, tmp_path: Path) -> None:
    overrides = ['checkpoint.save="checkpoints"', "checkpoint.save_interval=2"]
    overrides += ["checkpoint.async_save=true"]
    found = on_ranks(2, stops_while_saving, config, overrides, tmp_path)
    assert found == ["global_step4\n"] * 2


def test_streams_of_another_kind_of_device_start_anew(
    config: Path, saved: Path, tmp_path: Path
) -> None:
    """A GPU's generator has 16 bytes of state, the CPU's 5,056."""
    shutil.copytree(saved, tmp_path / "c")
    folder = tmp_path / "c/global_step6"
    path = folder / "rng_00001.safetensors"
    save_file({name: torch.zeros(16, dtype=torch.uint8) for name in load_file(path)}, path)
    manifest = Manifest.read(folder)
    replace(manifest, files=manifest.files | {path.name: file_facts(path)}).write(folder)
    load = [*layout(2, 1), f'checkpoint.load="{tmp_path / "c"}"']
    for said, _ in on_ranks(2, first_lines, config, load, tmp_path):
        assert any("seeded anew, since it was saved on another kind of device" in x for x in said)


def drift(trainer: Trainer) -> None:
    """Let a norm's copy on tensor rank 1 go its own way."""
    if trainer.groups.tensor.rank != 1:
        return
    for fragment in trainer.engine.fragments():
        if "final_norm.weight" in fragment.placement.names:
            fragment.states["fp32"][3] += 0.25


def saving_run(
    config: Path, overrides: list[str], run_dir: Path, prepare: Callable[[Trainer], None] | None
) -> list[str]:
    """Warnings of a run that saves."""
    said: list[str] = []
    trainer = make_trainer(config, overrides, run_dir)
    trainer.report._echo = said.append
    if prepare is not None:
        prepare(trainer)
    trainer.fit()
    trainer.report.close()
    trainer.engine.close()
    return [line for line in said if "WARNING" in line]


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_save_names_copies_that_differ(model: str, config: Path, tmp_path: Path) -> None:
    overrides = [*layout(2, 2, zero=2), 'checkpoint.save="checkpoints"', "training.train_iters=2"]
    overrides += [f"model.untie_embeddings_and_output_weights={str(model == 'untied').lower()}"]
    for lines in on_ranks(4, saving_run, config, overrides, tmp_path, None):
        assert lines == [], "a healthy run has no drift, not by one bit"
    shutil.rmtree(tmp_path / "checkpoints")
    found = on_ranks(4, saving_run, config, overrides, tmp_path, drift)
    assert any(
        "final_norm.weight (fp32): the copy on pipeline rank 1, tensor rank 1" in x
        for x in found[0]
    )
