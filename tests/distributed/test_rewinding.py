"""Going back to a checkpoint and on past what harmed the run; losses that jump."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.rewinding import WentBack
from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result
from tests.distributed.small import layout, rows, small_config
from tests.distributed.wrong_numbers import Case, Spoil, run_cases, run_two

SAVING = ['checkpoint.save="checkpoints"', "checkpoint.save_interval=3"]
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
REWIND = "training.on_nan=rewind"


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of four samples in fp32."""
    folder = tmp_path_factory.mktemp("rewinding")
    return small_config(folder / "run.json", corpus, training={"train_iters": 8})


def from_step_3(skip: str, folder: Path) -> Sequence[str]:
    """What the run would have been that started at the checkpoint without the samples."""
    load = f'checkpoint.load="{folder / "a/checkpoints"}"'
    return [load, "checkpoint.ckpt_step=3", f"data.skip_samples={skip}"]


class Skipping:
    """from_step_3 of a range, that can be pickled."""

    def __init__(self, skip: str) -> None:
        self.skip = skip

    def __call__(self, folder: Path) -> Sequence[str]:
        return from_step_3(self.skip, folder)


def assert_same_from_step_3(pairs: Sequence[tuple[Result, Result]], folder: Path) -> None:
    """The steps after the rewind are those of the other run, and so is the last checkpoint."""
    for spoilt, clean in pairs:
        assert len(clean.norms) == 5, "iterations 4 to 8"
        assert spoilt.norms[-5:] == clean.norms
        assert spoilt.losses[-5:] == clean.losses
        assert all(clean.applied)
    ends = [Manifest.read(folder / run / "checkpoints/global_step8") for run in "ab"]
    assert ends[0].files == ends[1].files
    assert ends[0].scalars == ends[1].scalars
    own = {"rewinds", "skip_samples", "recent_losses"}
    kept = [{k: v for k, v in end.progress.items() if k not in own} for end in ends]
    assert kept[0] == kept[1]
    assert ends[0].progress["rewinds"] == 1


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            [
                *layout(1, 2),
                'precision.dtype="fp16"',
                "precision.loss_scale=128",
                "data.num_workers=1",
                "checkpoint.async_save=true",
            ],
            id="pp2-fp16-worker-async",
        ),
        pytest.param([*layout(zero=3), 'precision.dtype="bf16"'], id="dp2-zero3-bf16"),
    ],
)
def test_a_rewind_is_a_start_from_the_checkpoint_without_the_samples(
    overrides: list[str], config: Path, tmp_path: Path
) -> None:
    """Iteration 5 is bad: back to 3, and on without samples 12 to 19."""
    case = Case(
        [*overrides, *SAVING, *DROPOUT, REWIND],
        Spoil("forward", "layers.0.mlp.down", rank=1, iteration=5),
    )
    pairs = on_ranks(2, run_two, config, case, Skipping("[[12, 20]]"), tmp_path)
    assert_same_from_step_3(pairs, tmp_path)
    end = Manifest.read(tmp_path / "a/checkpoints/global_step8").progress
    assert end["skip_samples"] == [[12, 20]]
    assert (end["consumed_samples"], end["left_out_samples"]) == (32, 8)
    (row,) = rows(tmp_path / "a", "rewind")
    assert (row["from_iteration"], row["iteration"], row["skip_samples"]) == (5, 3, [12, 20])
    assert row["because"].startswith("nonfinite: loss not finite in the step at loss scale")
    assert Path(row["file"]).name == "iteration_5.json"
    assert [row["iteration"] for row in rows(tmp_path / "a")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["skipped_iterations"] for row in rows(tmp_path / "a")] == [0] * 8


def test_a_spike_and_the_batch_alone(config: Path, tmp_path: Path) -> None:
    """Only the bad batch is left out; what losses are compared with goes back as well."""
    rule = '{"action": "rewind", "window": 3, "threshold": 20}'
    overrides = [*SAVING, f"training.loss_spike={rule}", "training.rewind_batches=1"]
    overrides += ["logging.tensorboard_dir=board"]
    case = Case(overrides, Spoil("loss", "head", iteration=5))
    pairs = on_ranks(1, run_two, config, case, Skipping("[[16, 20]]"), tmp_path)
    assert_same_from_step_3(pairs, tmp_path)
    ends = [Manifest.read(tmp_path / run / "checkpoints/global_step8").progress for run in "ab"]
    assert ends[0]["recent_losses"] == ends[1]["recent_losses"] != []
    assert "spike: loss" in rows(tmp_path / "a", "rewind")[0]["because"]


class LeavingAtOnce:
    """A run that a signal reaches while it goes back."""

    def __init__(self, spoil: Spoil) -> None:
        self.spoil = spoil

    def __call__(self, trainer: Trainer) -> None:
        self.spoil(trainer)
        go_back = trainer.rewinder.go_back

        def then_leave(*args: Any, **kwargs: Any) -> WentBack:
            trainer.left_because = "a signal"
            return go_back(*args, **kwargs)

        trainer.rewinder.go_back = then_leave  # type: ignore[method-assign]


def test_what_else_may_be_done_about_a_spike(config: Path, tmp_path: Path) -> None:
    def rule(action: str) -> list[str]:
        return [f'training.loss_spike={{"action": "{action}", "window": 3, "threshold": 20}}']

    spike = Spoil("loss", "head", iteration=5)
    nan = Spoil("forward", "layers.0.mlp.down", iteration=5, after_rewinds=True)
    early = Spoil("forward", "layers.0.mlp.down", iteration=2)
    cases = [
        *(Case(rule(action), spike) for action in ("log", "skip", "stop")),
        Case([*SAVING, REWIND, "training.max_rewinds=2"], nan),
        Case([*SAVING, REWIND], early),
        Case([*SAVING, REWIND], LeavingAtOnce(Spoil("forward", "layers.0.mlp.down", iteration=5))),
    ]
    (errors,) = on_ranks(1, run_cases, config, cases, tmp_path, watchdog=90)
    logged = [rows(tmp_path / str(number)) for number in range(3)]
    assert [row["skipped_iterations"] for row in logged[0]] == [0] * 8
    assert [row["skipped_iterations"] for row in logged[1]] == [0] * 4 + [1] + [0] * 3
    assert logged[1][4]["grad_norm"] is None and logged[0][4]["grad_norm"] > 0
    assert [row["lm_loss"] for row in logged[0]][:5] == [row["lm_loss"] for row in logged[1]][:5]
    assert logged[1][4]["learning_rate"] == logged[1][3]["learning_rate"]
    assert errors[:2] == ["", ""]
    assert [rows(tmp_path / str(n), "spike")[0]["action"] for n in range(3)] == [
        "log",
        "skip",
        "stop",
    ]
    assert "iteration 5: loss" in errors[2] and "is a spike" in errors[2]
    assert len(logged[2]) == 5

    assert "gone back to iteration 3 2 times" in errors[3]
    back = rows(tmp_path / "3", "rewind")
    assert [row["skip_samples"] for row in back] == [[12, 20], [12, 28]]
    assert "no checkpoint of this run yet" in errors[4]

    left = Manifest.read(tmp_path / "5/checkpoints/global_step3").progress
    assert (left["iteration"], left["rewinds"], left["skip_samples"]) == (3, 1, [[12, 20]])
    assert [row["iteration"] for row in rows(tmp_path / "5", "save")] == [3, 3]
