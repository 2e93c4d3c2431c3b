"""Every schedule trains the same model as one process, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint.save import Saved
from megatron_lite.pipeline.greedy import arrange, empty_table, forwards_first
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.table_files import table_as_json
from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, train
from tests.distributed.schedules import MODELS, SCHEDULES, overrides
from tests.distributed.small import layout, rows
from tests.distributed.test_parity import assert_same_training

MATRIX = list(product(SCHEDULES, MODELS, (2, 4), (1, 2), (1, 2)))
COVERING = {
    ("interleaved", "tied", 4, 1, 1),
    ("interleaved", "untied", 2, 2, 2),
    ("chimera", "tied", 4, 1, 2),
    ("chimera", "tied", 2, 2, 1),
    ("chimera", "untied", 4, 2, 2),
    ("zb-h1", "tied", 4, 1, 1),
    ("zb-h1", "untied", 2, 2, 2),
    ("zbv", "tied", 4, 1, 2),
    ("zbv", "untied", 2, 2, 1),
    ("dualpipev", "tied", 4, 1, 1),
    ("dualpipev", "untied", 2, 2, 2),
}
"""GPipe and 1F1B are in test_parity's covering set."""


def _case(case: tuple[str, str, int, int, int]) -> object:
    schedule, model, pp, dp, zero = case
    marks = [] if case in COVERING else [pytest.mark.every]
    return pytest.param(*case, marks=marks, id=f"{schedule}-{model}-pp{pp}-dp{dp}-zero{zero}")


@pytest.mark.parametrize(("schedule", "model", "pp", "dp", "zero"), [_case(c) for c in MATRIX])
def test_schedule_parity(
    schedule: str,
    model: str,
    pp: int,
    dp: int,
    zero: int,
    deep_configs: dict[str, Path],
    deep_reference: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    chosen = overrides(schedule, pp, zero)
    runs = on_ranks(pp * dp, train, deep_configs[model], chosen, tmp_path, watchdog=120)
    assert_same_training(runs, deep_reference(model))


@pytest.mark.parametrize(("name", "pp"), [("zbv", 2), ("chimera", 4)])
def test_a_table_from_a_file_trains_the_same_model(
    name: str,
    pp: int,
    deep_configs: dict[str, Path],
    deep_reference: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    """With two stages a rank, and with two directions; evaluation runs on its placement, too."""
    table = build_schedule(name, num_ranks=pp, num_microbatches=8)
    path = tmp_path / "mine.json"
    path.write_text(table_as_json(table))
    chosen = [*layout(1, pp), f"parallel.pipeline_schedule={path}"]
    chosen += ["training.eval_interval=10", "training.eval_iters=1"]
    runs = on_ranks(pp, train, deep_configs["tied"], chosen, tmp_path, watchdog=120)
    assert_same_training(runs, deep_reference("tied"))
    (valid,) = rows(tmp_path, "valid")
    assert 0 < valid["lm_loss"] < 10


UPSIDE_DOWN = [[1, 0]]
ENDS_APART = [[0, 1, 3, 2], [3, 2, 0, 1]]


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(
    "placements",
    [
        pytest.param(UPSIDE_DOWN, id="upside-down"),
        pytest.param(ENDS_APART, id="two-ways-whose-ends-are-apart"),
    ],
)
def test_tied_tables_in_odd_places(
    placements: list[list[int]],
    zero: int,
    deep_configs: dict[str, Path],
    deep_reference: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    """The head on model-parallel rank 0, of which DeepSpeed would count all; and embeddings and
    heads of both directions on four ranks."""
    pp, ways = len(placements[0]), len(placements)
    empty = empty_table("odd", placements, [i % ways for i in range(8)])
    table = arrange(empty, durations={"F": 1.0, "B": 2.0}, live=pp, rule=forwards_first)
    path = tmp_path / "odd.json"
    path.write_text(table_as_json(table))
    chosen = [*layout(1, pp, zero=zero), f"parallel.pipeline_schedule={path}"]
    runs = on_ranks(pp, train, deep_configs["tied"], chosen, tmp_path, watchdog=120)
    assert_same_training(runs, deep_reference("tied"))


def refuse_drift(trainer: Trainer) -> None:
    """Fail where a save finds copies that differ."""
    report = trainer.report.saved

    def saved(found: Saved, *args: Any, **kwargs: Any) -> None:
        assert found.differing == []
        report(found, *args, **kwargs)

    trainer.report.saved = saved  # type: ignore[method-assign]


def test_checkpoints_pass_between_schedules(
    deep_configs: dict[str, Path], deep_reference: Callable[[str], Result], tmp_path: Path
) -> None:
    """Chimera saves (copies of norms lie on two ranks of a pair), interleaved goes on and saves,
    one process ends the run as one that was never broken off."""
    kept = ['checkpoint.save="kept"', 'checkpoint.load="kept"', "logging.log_interval=1"]
    kept.append("checkpoint.exit_on_missing_checkpoint=false")
    legs = [
        (8, 3, [*overrides("chimera", 4, 2), "parallel.tensor_model_parallel_size=2"]),
        (4, 6, overrides("interleaved", 2, 1)),
        (1, 10, []),
    ]
    losses: list[float] = []
    for ranks, steps, chosen in legs:
        run = [*chosen, *kept, f"training.train_iters={steps}"]
        results = on_ranks(
            ranks, train, deep_configs["tied"], run, tmp_path, refuse_drift, watchdog=120
        )
        losses += results[0].losses
    assert losses == pytest.approx(deep_reference("tied").losses, rel=1e-4)
