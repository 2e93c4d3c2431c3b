"""A resumed run is the unbroken run, bit for bit; what can't be loaded is refused by all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.trainer import Trainer
from tests.distributed.faults import poison
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, train
from tests.distributed.small import layout, rows, small_config

Prepare = Callable[[Trainer], None]

WORKER = "data.num_workers=1"
SAVING = ['checkpoint.save="checkpoints"', "checkpoint.save_interval=5"]


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps in fp32."""
    return small_config(tmp_path_factory.mktemp("resume") / "run.json", corpus)


def resume(folder: Path, step: int) -> list[str]:
    """Overrides that load a step of another run."""
    return [f'checkpoint.load="{folder / "checkpoints"}"', f"checkpoint.ckpt_step={step}"]


def unbroken_and_resumed(
    world_size: int,
    config: Path,
    overrides: list[str],
    folder: Path,
    *,
    step: int,
    prepare: Prepare | None = None,
) -> tuple[list[Result], list[Result]]:
    """A whole run that saves at `step`, and one that goes on from there, in folders a and b."""
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    whole = on_ranks(world_size, train, config, overrides, folder / "a", prepare)
    again = [*overrides, *resume(folder / "a", step)]
    return whole, on_ranks(world_size, train, config, again, folder / "b", prepare)


def assert_same_bits(
    whole: list[Result], resumed: list[Result], folder: Path, *, step: int, end: int
) -> None:
    """Equal losses, norms, scales, and files of the last step: states and random streams."""
    for one, other in zip(whole, resumed, strict=True):
        assert len(one.losses) == end and len(other.losses) == end - step
        assert other.losses == one.losses[step:]
        assert other.norms == one.norms[step:]
        assert other.scales == one.scales[step:]
        assert other.applied == one.applied[step:]
    ends = [Manifest.read(folder / run / f"checkpoints/global_step{end}") for run in "ab"]
    assert ends[0].files == ends[1].files
    assert ends[0].progress == ends[1].progress
    assert ends[0].scalars == ends[1].scalars
    early = Manifest.read(folder / f"a/checkpoints/global_step{step}")
    assert early.files.keys() == ends[0].files.keys()
    for name, file in ends[0].files.items():
        # Without dropout nobody draws random numbers, and their streams stay where they are.
        assert early.files[name] != file or name.startswith("rng")


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(4, [*layout(2, 1, zero=1), WORKER], id="tp2-dp2-zero1-worker"),
        pytest.param(4, [*layout(1, 2, zero=2), 'precision.dtype="bf16"'], id="pp2-dp2-zero2-bf16"),
        pytest.param(4, [*layout(2, 1, zero=3), 'precision.dtype="bf16"'], id="tp2-dp2-zero3-bf16"),
        pytest.param(2, layout(1, 1, zero=3, offload="cpu"), id="dp2-zero3-cpu"),
    ],
)
def test_b45_same_layout_goes_on_bit_for_bit(
    world_size: int, overrides: list[str], config: Path, tmp_path: Path
) -> None:
    """With dropout, whose masks come from random streams, once with a worker that reads ahead."""
    overrides = [*overrides, *SAVING, "model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
    whole, resumed = unbroken_and_resumed(world_size, config, overrides, tmp_path, step=5)
    assert_same_bits(whole, resumed, tmp_path, step=5, end=10)
    assert len(set(whole[0].losses)) == 10
    early, late = (
        Manifest.read(tmp_path / f"a/checkpoints/global_step{step}").files for step in (5, 10)
    )
    streams = [name for name in early if name.startswith("rng")]
    assert len({early[name].xxh3_128 for name in streams}) == world_size, "each rank has its own"
    assert all(early[name] != late[name] for name in streams), "and draws from it"
    (loaded,) = rows(tmp_path / "b", "load")
    assert (loaded["iteration"], loaded["consumed_samples"]) == (5, 20)
    assert [row["iteration"] for row in rows(tmp_path / "b")] == [6, 7, 8, 9, 10]
    assert [row["iteration"] for row in rows(tmp_path / "b", "save")] == [10]


def test_b45_saving_does_not_touch_the_run(config: Path, tmp_path: Path) -> None:
    dropout = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
    (plain,) = on_ranks(1, train, config, dropout, tmp_path)
    saving = [*dropout, 'checkpoint.save="checkpoints"', "checkpoint.save_interval=2"]
    (saved,) = on_ranks(1, train, config, saving, tmp_path)
    assert saved.losses == plain.losses and saved.norms == plain.norms


def test_b32_loss_scaler_goes_on_as_well(config: Path, tmp_path: Path) -> None:
    """Window 5, patience 2: an overflow before the save uses up patience for one after it."""
    overrides = [*layout(2, 2, zero=2, offload="cpu"), 'checkpoint.save="checkpoints"']
    overrides += ['precision.dtype="fp16"', "precision.loss_scale_window=5"]
    overrides += ["precision.hysteresis=2", "checkpoint.save_interval=7", "training.train_iters=18"]
    spoil = partial(poison, steps=(4, 9), ranks=(2,))
    whole, resumed = unbroken_and_resumed(4, config, overrides, tmp_path, step=7, prepare=spoil)
    assert_same_bits(whole, resumed, tmp_path, step=7, end=18)
    scales = whole[0].scales
    assert scales[3] == scales[7] == 65536.0, "patience holds the scale at the first overflow"
    assert scales[8] == 32768.0, "and is used up at the second"
    assert scales[-1] == 65536.0, "the window has passed"


def test_what_a_checkpoint_says_of_itself(config: Path, tmp_path: Path) -> None:
    """The manifest as the design describes it, and files that are what it says."""
    from megatron_lite.checkpoint.scan import file_facts

    overrides = [*layout(2, 2, zero=2), 'checkpoint.save="checkpoints"', "training.train_iters=2"]
    on_ranks(4, train, config, overrides, tmp_path)
    root = tmp_path / "checkpoints"
    assert (root / "latest").read_text().strip() == "global_step2"
    assert {entry.name for entry in root.iterdir()} == {"latest", "global_step2"}
    folder = root / "global_step2"
    raw = json.loads((folder / "manifest.json").read_text())
    assert raw["format_version"] == 1
    assert raw["progress"]["iteration"] == 2 and raw["progress"]["consumed_samples"] == 8
    assert {axis: raw["layout"][axis] for axis in ("tp", "dp", "pp")} == {"tp": 2, "dp": 1, "pp": 2}
    assert raw["model"]["hidden_size"] == 32
    embedding = raw["tensors"]["embedding.word_embeddings.weight"]
    assert embedding["shape"] == [90, 32] and embedding["dtype"] == "float32", "no padding on disk"
    assert embedding["cut"] == {"dim": 0, "length": 96}, "what another layout has to know"
    assert raw["tensors"]["final_norm.weight"]["cut"] is None
    assert "layers.1.attention.query.weight" in raw["tensors"], "and nothing fused"
    assert raw["boxes"][0].keys() == {"tensor", "state", "offset", "size", "file", "key"}
    names = {path.name for path in folder.iterdir()}
    assert names == {*raw["files"], "manifest.json", "config.json", "origins.json"}
    kinds = ("shard", "rng")
    assert raw["files"].keys() == {f"{k}_0000{r}.safetensors" for k in kinds for r in range(4)}
    for name, facts in raw["files"].items():
        found = file_facts(folder / name)
        assert facts == {"bytes": found.bytes, "xxh3_128": found.xxh3_128}
    kept = json.loads((folder / "config.json").read_text())
    assert kept["parallel"]["pipeline_model_parallel_size"] == 2
    assert kept["training"]["train_iters"] == 2


def test_only_the_newest_are_kept(config: Path, tmp_path: Path) -> None:
    overrides = ['checkpoint.save="checkpoints"', "checkpoint.save_interval=1"]
    overrides += ["checkpoint.keep_last=2", "training.train_iters=4"]
    on_ranks(2, train, config, overrides, tmp_path)
    found = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert found == {"latest", "global_step3", "global_step4"}
    assert (tmp_path / "checkpoints/latest").read_text().strip() == "global_step4"
