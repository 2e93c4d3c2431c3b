"""Which checkpoint is loaded, on which layout, and what happens where none can be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.checkpoint.tensor_file import TensorWriter
from megatron_lite.report import Reporter
from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import logical_state, make_trainer, merged, train
from tests.distributed.small import layout, rows, small_config

States = dict[str, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in fp32."""
    folder = tmp_path_factory.mktemp("reload")
    return small_config(folder / "run.json", corpus, training={"train_iters": 6})


@pytest.fixture(scope="module")
def saved(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2, 4 and 6 of a run with tensor 2 × pipeline 2."""
    run_dir = tmp_path_factory.mktemp("saved")
    overrides = [*layout(2, 2, zero=2), 'checkpoint.save="checkpoints"']
    on_ranks(4, train, config, [*overrides, "checkpoint.save_interval=2"], run_dir)
    return run_dir / "checkpoints"


def loaded_states(config: Path, overrides: list[str], run_dir: Path) -> States:
    """This rank's parts of all states right after loading."""
    trainer = make_trainer(config, overrides, run_dir)
    states = {state: logical_state(trainer.engine, state) for state in STATES}
    trainer.report.close()
    trainer.engine.close()
    return states


def first_lines(config: Path, overrides: list[str], run_dir: Path) -> tuple[list[str], bytes]:
    """What a run says before it trains, and the state of its random numbers then."""
    said: list[str] = []
    Reporter.say = lambda self, line: said.append(line)  # type: ignore[method-assign]
    trainer = make_trainer(config, overrides, run_dir)
    trainer.report.close()
    trainer.engine.close()
    return said, torch.get_rng_state().numpy().tobytes()


def attempt(config: Path, overrides: list[str], run_dir: Path) -> tuple[int, str]:
    """The iteration that a run would start from, and the error if it doesn't."""
    try:
        trainer = make_trainer(config, overrides, run_dir)
    except CheckpointError as error:
        return -1, str(error)
    trainer.report.close()
    trainer.engine.close()
    return trainer.progress.iteration, ""


def attempts(config: Path, all_overrides: list[list[str]], run_dir: Path) -> list[tuple[int, str]]:
    """Several attempts, one after the other."""
    return [attempt(config, overrides, run_dir) for overrides in all_overrides]


def train_until_error(
    config: Path, overrides: list[str], run_dir: Path, prepare: Callable[[Trainer], None]
) -> str:
    """What stopped a run."""
    try:
        train(config, overrides, run_dir, prepare)
    except CheckpointError as error:
        return str(error)
    return ""


def on_disk(folder: Path) -> States:
    """The logical tensors of a checkpoint, put together from its boxes, each element once."""
    manifest = Manifest.read(folder)
    files = {name: load_file(folder / name) for name in {box.file for box in manifest.boxes}}
    states: States = {
        state: {
            name: np.full(tensor.shape, np.nan, np.float32)
            for name, tensor in manifest.tensors.items()
        }
        for state in STATES
    }
    for stored in manifest.boxes:
        place = states[stored.state][stored.tensor][stored.box.slices()]
        assert np.isnan(place).all(), f"{stored.tensor}: elements that two boxes hold"
        place[...] = files[stored.file][stored.key]
    for state, tensors in states.items():
        for name, values in tensors.items():
            assert not np.isnan(values).any(), f"{state} of {name}: elements in no box"
    return states


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(2, layout(1, 1, zero=1), id="dp2-zero1"),
        pytest.param(2, layout(1, 1, zero=3), id="dp2-zero3"),
        pytest.param(4, layout(2, 1, zero=2, offload="cpu"), id="tp2-dp2-zero2-cpu"),
    ],
)
def test_another_layout_loads_the_same_bits(
    world_size: int, overrides: list[str], config: Path, saved: Path, tmp_path: Path
) -> None:
    load = [*overrides, f'checkpoint.load="{saved}"', "checkpoint.ckpt_step=4"]
    parts = on_ranks(world_size, loaded_states, config, load, tmp_path)
    expected = on_disk(saved / "global_step4")
    for state in STATES:
        found = merged([part[state] for part in parts])
        assert found.keys() == expected[state].keys()
        for name, values in expected[state].items():
            assert np.abs(values).max() > 0, f"{state} of {name} is empty"
            np.testing.assert_array_equal(found[name], values, err_msg=f"{state} of {name}")


def test_another_layout_goes_on_with_the_same_loss(
    config: Path, saved: Path, tmp_path: Path
) -> None:
    load = [*layout(1, 1, zero=3), f'checkpoint.load="{saved}"', "checkpoint.ckpt_step=4"]
    runs = on_ranks(2, train, config, load, tmp_path)
    unbroken = rows(saved.parent)
    for run in runs:
        assert run.losses == pytest.approx([row["lm_loss"] for row in unbroken[4:]], rel=1e-5)
        assert run.norms == pytest.approx([row["grad_norm"] for row in unbroken[4:]], rel=1e-5)


def test_b45_another_layout_seeds_its_random_streams_anew(
    config: Path, saved: Path, tmp_path: Path
) -> None:
    load = [f'checkpoint.load="{saved}"', "checkpoint.ckpt_step=4"]
    (fresh,), (anew,) = (on_ranks(1, first_lines, config, o, tmp_path) for o in ([], load))
    assert any("random streams seeded anew" in line for line in anew[0])
    assert not any("seeded anew" in line for line in fresh[0])
    assert fresh[1] != anew[1], "or the masks of step 1 would come again"


def scales(config: Path, all_overrides: list[list[str]], run_dir: Path) -> list[float]:
    """The loss scale that each of several runs begins with."""
    found = []
    for overrides in all_overrides:
        trainer = make_trainer(config, overrides, run_dir)
        found.append(trainer.engine.loss_scale)
        trainer.report.close()
        trainer.engine.close()
    return found


def test_b32_a_scale_goes_on_where_it_still_means_something(
    config: Path, saved: Path, tmp_path: Path
) -> None:
    """From fp32 to fp16 it starts anew, from fp16 to fp16 it goes on; else the config rules."""
    fp16 = ['precision.dtype="fp16"', "precision.loss_scale_window=1"]
    save = [*fp16, "precision.initial_loss_scale=64", 'checkpoint.save="checkpoints"']
    (run,) = on_ranks(1, train, config, save, tmp_path)
    assert run.scales[-1] > 64
    own, other = (f'checkpoint.load="{folder}"' for folder in (tmp_path / "checkpoints", saved))
    cases = {
        (*fp16, own): run.scales[-1],
        (*fp16, other): 65536.0,
        (fp16[0], "precision.loss_scale=32", own): 32.0,
        ('precision.dtype="bf16"', own): 1.0,
    }
    (found,) = on_ranks(1, scales, config, [list(case) for case in cases], tmp_path)
    assert found == list(cases.values())


def test_b40_steps_that_exist_and_steps_that_do_not(
    config: Path, saved: Path, tmp_path: Path
) -> None:
    misspelt, empty, dangling = (tmp_path / name for name in ("chekpoints", "empty", "dangling"))
    empty.mkdir()
    shutil.copytree(saved, dangling)
    shutil.rmtree(dangling / "global_step6")
    optional = "checkpoint.exit_on_missing_checkpoint=false"
    cases = [
        [saved, 6],
        [saved, 4, "checkpoint.ckpt_step=4"],
        [saved, "2, 4, 6", "checkpoint.ckpt_step=5"],
        [saved, "2, 4, 6", "checkpoint.ckpt_step=5", optional],
        [misspelt, "no checkpoint"],
        [empty, "no checkpoint"],
        [empty, 0, optional],
        [dangling, "names global_step6, which is not there; steps there: 2, 4"],
        [dangling, "names global_step6, which is not there; steps there: 2, 4", optional],
    ]
    tried = [[f'checkpoint.load="{folder}"', *overrides] for folder, _, *overrides in cases]
    one, other = on_ranks(2, attempts, config, tried, tmp_path)
    assert one == other
    for (folder, expected, *_), (iteration, error) in zip(cases, one, strict=True):
        if isinstance(expected, int):
            assert (iteration, error) == (expected, "")
        else:
            assert iteration == -1 and str(folder) in error and expected in error


@pytest.mark.parametrize(
    ("layers", "wrong"),
    [(4, "layers.2.mlp.down.weight: not in the checkpoint"), (1, "layers.1.mlp.down.weight")],
)
def test_b40_another_model_is_refused_by_all_ranks(
    layers: int, wrong: str, config: Path, saved: Path, tmp_path: Path
) -> None:
    """Missing and superfluous tensors are all listed, also on the stage that lacks none."""
    overrides = [f'checkpoint.load="{saved}"', f"model.num_layers={layers}"]
    stages = 2 if layers > 1 else 1
    found = on_ranks(stages, attempt, config, [*layout(1, stages), *overrides], tmp_path)
    for iteration, error in found:
        assert iteration == -1 and wrong in error
        assert error.count("layers.") >= 12


def test_b40_a_damaged_file_is_refused_by_name(config: Path, saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    shard = copy / "global_step6/shard_00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    overrides = [*layout(2, 2), f'checkpoint.load="{copy}"']
    for iteration, error in on_ranks(4, attempt, config, overrides, tmp_path):
        assert iteration == -1 and "shard_00002.safetensors" in error


def full_disk(trainer: Trainer) -> None:
    """Let rank 1 find no space from its second checkpoint on."""
    if dist.get_rank() != 1:
        return
    write = TensorWriter.write

    def no_space(self: TensorWriter, values: np.ndarray) -> None:
        if trainer.progress.iteration > 2:
            raise OSError(28, "No space left on device")
        write(self, values)

    TensorWriter.write = no_space  # type: ignore[method-assign]


def pointer_in_the_way(trainer: Trainer) -> None:
    """Let the very last act of the second checkpoint fail, on rank 0: moving `latest`."""
    save = trainer.save

    def blocked() -> None:
        if trainer.progress.iteration > 2 and dist.get_rank() == 0:
            (trainer.saver.root / ".latest.tmp").mkdir(exist_ok=True)
        save()

    trainer.save = blocked


@pytest.mark.parametrize(
    ("fault", "told"), [(full_disk, "No space left"), (pointer_in_the_way, ".latest.tmp")]
)
def test_a_failed_save_is_told_to_all_and_leaves_the_old_one(
    fault: Callable[[Trainer], None], told: str, config: Path, tmp_path: Path
) -> None:
    overrides = ['checkpoint.save="checkpoints"', "checkpoint.save_interval=2"]
    for error in on_ranks(2, train_until_error, config, overrides, tmp_path, fault):
        assert told in error and str(tmp_path / "checkpoints") in error
    root = tmp_path / "checkpoints"
    assert (root / "latest").read_text().strip() == "global_step2"
    on_disk(root / "global_step2")
    # The pointer moves last: the new checkpoint is whole by then.
    assert (root / "global_step4").is_dir() == (fault is pointer_in_the_way)
    load = ['checkpoint.load="checkpoints"', "checkpoint.exit_on_missing_checkpoint=true"]
    assert on_ranks(2, attempt, config, load, tmp_path) == [(2, "")] * 2
    shutil.rmtree(root / ".latest.tmp", ignore_errors=True)
    on_ranks(2, train, config, [*overrides, *load], tmp_path)
    names = {path.name for path in root.iterdir()}
    assert names == {"latest", "global_step2", "global_step4", "global_step6"}, "rests are gone"
