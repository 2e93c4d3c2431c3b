"""B60: what a resumed run takes from the checkpoint, what may differ, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import LoadedConfig, load_config, resolved_dict
from megatron_lite.config.resuming import SavedRun, data_differ, resume_config
from megatron_lite.config.schema import CheckpointConfig
from megatron_lite.train import saved_run


@pytest.fixture
def path(small_run: dict[str, Any], tmp_path: Path) -> Path:
    """The config file of a run that loads."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(small_run | {"checkpoint": {"load": "checkpoints"}}))
    return file


@pytest.fixture
def saved(path: Path) -> SavedRun:
    """The same run with a few settings given on the command line, four ranks."""
    given = ["optimizer.lr_decay_style=linear", "training.seed=7", "training.train_iters=20"]
    given += ['precision.dtype="fp16"', "precision.loss_scale_window=50"]
    loaded = load_config(path, given, 4)
    return SavedRun("global_step10", resolved_dict(loaded.config), loaded.origins)


def resume(path: Path, saved: SavedRun, *overrides: str, world_size: int = 4) -> LoadedConfig:
    return resume_config(path, overrides, world_size, check_files=False, saved=saved)


def test_the_user_then_the_checkpoint_then_defaults(path: Path, saved: SavedRun) -> None:
    loaded = resume(path, saved)
    assert loaded.config.training.train_iters == 10, "the file says so"
    assert loaded.config.optimizer.lr_decay_style == "linear", "the checkpoint's, not the default"
    assert loaded.config.training.seed == 7
    assert loaded.origins["optimizer.weight_decay"] == "default"
    assert loaded.origins["training.seed"] == "checkpoint global_step10"
    assert any(line.startswith("training.seed: 7, as in the checkpoint") for line in loaded.notes)
    assert "training.train_iters: 20 in global_step10, now 10" in loaded.notes
    assert sum("train_iters" in line for line in loaded.notes) == 1, "each difference once"


@pytest.mark.parametrize(
    ("overrides", "listed"),
    [
        (["training.train_iters=40"], "training.train_iters: 20 in global_step10, now 40"),
        (["training.global_batch_size=8"], "training.global_batch_size: 16 in global_step10, now"),
        (["optimizer.lr=5e-4"], "optimizer.lr: 0.001 in global_step10, now 0.0005"),
        (["parallel.tensor_model_parallel_size=2"], "parallel.tensor_model_parallel_size: 1 in"),
        (["deepspeed.zero_optimization.stage=2"], "deepspeed.zero_optimization.stage: 1 in"),
        (["model.make_vocab_size_divisible_by=64"], "model.make_vocab_size_divisible_by"),
    ],
)
def test_what_may_differ_is_listed(
    overrides: list[str], listed: str, path: Path, saved: SavedRun
) -> None:
    assert any(listed in line for line in resume(path, saved, *overrides).notes)


def test_fewer_ranks_are_no_difference(path: Path, saved: SavedRun) -> None:
    same = ["training.train_iters=20"]
    one, other = (resume(path, saved, *same, world_size=n) for n in (4, 2))
    assert one.config == other.config
    assert [line for line in other.notes if "in global_step10, now" in line] == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.hidden_size=128", "model.hidden_size = 128: is 64 in global_step10: another model"),
        ("model.swiglu=true", "model.swiglu = true: is false in global_step10: another model"),
        ("model.norm_epsilon=1e-3", "model.norm_epsilon = 0.001: is 1e-05"),
        ("model.vocab_size=200", "model.vocab_size = 200: is 100"),
        ("data.data_path=elsewhere", "other data; set checkpoint.changed_data"),
        ("training.seed=8", "training.seed = 8: is 7 in global_step10: other data"),
        ("model.seq_length=16", "model.seq_length = 16: is 32 in global_step10: other data"),
    ],
)
def test_what_may_not_differ(override: str, told: str, path: Path, saved: SavedRun) -> None:
    with pytest.raises(ConfigError) as error:
        resume(path, saved, override)
    assert told in str(error.value) and "[--set]" in str(error.value)


@pytest.mark.parametrize("choice", ["continue", "restart"])
def test_other_data_are_accepted_when_said(choice: str, path: Path, saved: SavedRun) -> None:
    overrides = ["data.data_path=elsewhere", f'checkpoint.changed_data="{choice}"']
    loaded = resume(path, saved, *overrides)
    assert any(line.startswith("data.data_path") for line in loaded.notes)
    assert data_differ(saved.config, resolved_dict(loaded.config))


def test_what_the_new_config_makes_useless_is_let_go(path: Path, saved: SavedRun) -> None:
    """bf16 has no loss scale, so the saved window would be refused as a dead key."""
    loaded = resume(path, saved, 'precision.dtype="bf16"')
    assert loaded.config.precision.dtype == "bf16"
    assert loaded.origins["precision.loss_scale_window"] == "default"
    with pytest.raises(ConfigError, match="loss_scale_window"):
        resume(path, saved, 'precision.dtype="bf16"', "precision.loss_scale_window=60")


def test_a_new_run_from_weights_is_compared_by_shapes_alone(path: Path, saved: SavedRun) -> None:
    loaded = resume(path, saved, "checkpoint.finetune=true", "model.norm_epsilon=1e-3")
    assert any("norm_epsilon" in line for line in loaded.notes)


def write(folder: Path, saved: SavedRun, **texts: str) -> None:
    """What a checkpoint keeps of a run's config."""
    folder.mkdir(parents=True)
    origins = texts.get("origins", json.dumps(saved.origins))
    (folder / "config.json").write_text(texts.get("config", json.dumps(saved.config)))
    (folder / "origins.json").write_text(origins)


@pytest.mark.parametrize("texts", [{"origins": "{"}, {"config": '{"model": {}}'}])
def test_settings_that_cant_be_read_are_not_replaced_by_defaults(
    texts: dict[str, str], saved: SavedRun, tmp_path: Path
) -> None:
    write(tmp_path / "c/global_step10", saved)
    write(tmp_path / "c/global_step20", saved, **texts)
    config = CheckpointConfig(load="c")
    with pytest.raises(CheckpointError, match=f"{next(iter(texts))}.json: damaged"):
        saved_run(config, tmp_path)
    fall_back = config.model_copy(update={"fall_back_to_older": True})
    found = saved_run(fall_back, tmp_path)
    assert found is not None and found.name == "global_step10"
    assert found.chosen() == saved.chosen()
    shutil.rmtree(tmp_path / "c/global_step10")
    with pytest.raises(CheckpointError, match="damaged"):
        saved_run(fall_back, tmp_path)
    assert saved_run(config, tmp_path / "elsewhere") is None


def test_settings_of_a_step_that_was_being_replaced(saved: SavedRun, tmp_path: Path) -> None:
    write(tmp_path / "c/.global_step10.old", saved)
    found = saved_run(CheckpointConfig(load="c"), tmp_path)
    assert found is not None and found.chosen() == saved.chosen()
