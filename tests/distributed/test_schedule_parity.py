"""Every schedule trains the same model: against one process, and against 1F1B, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.checkpoint.save import Saved
from megatron_lite.pipeline.greedy import arrange, empty_table, forwards_first
from megatron_lite.pipeline.schedules import build_schedule
from megatron_lite.pipeline.table_files import table_as_json
from megatron_lite.trainer import Trainer
from tests.distributed.faults import train_poisoned
from tests.distributed.models import GPT, LLAMA, write_config
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, merged, train
from tests.distributed.small import layout, rows
from tests.distributed.test_fp16 import alike
from tests.distributed.test_parity import assert_same_training

SCHEDULES = ("gpipe", "1f1b", "interleaved", "chimera", "zb-h1", "zbv", "dualpipev")
MODELS = {"tied": GPT, "untied": LLAMA}
LAYERS = 8
"""One for each stage where four ranks hold two stages each."""
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


def overrides(schedule: str, pp: int, zero: int) -> list[str]:
    """A layout with a schedule."""
    chosen = [*layout(1, pp, zero=zero), f"parallel.pipeline_schedule={schedule}"]
    if schedule == "interleaved":
        chosen.append("parallel.virtual_pipeline_model_parallel_size=2")
    return chosen


@pytest.fixture(scope="module")
def configs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("schedules")
    return {
        name: write_config(folder / f"{name}.json", corpus, model | {"num_layers": LAYERS})
        for name, model in MODELS.items()
    }


@pytest.fixture(scope="module")
def reference(
    configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Result]:
    """Runs of one process, each made once."""
    found: dict[str, Result] = {}

    def run(model: str) -> Result:
        if model not in found:
            run_dir = tmp_path_factory.mktemp("reference")
            found[model] = on_ranks(1, train, configs[model], [], run_dir)[0]
        return found[model]

    return run


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
    configs: dict[str, Path],
    reference: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    chosen = overrides(schedule, pp, zero)
    runs = on_ranks(pp * dp, train, configs[model], chosen, tmp_path, watchdog=120)
    assert_same_training(runs, reference(model))


@pytest.mark.parametrize(("name", "pp"), [("zbv", 2), ("chimera", 4)])
def test_a_table_from_a_file_trains_the_same_model(
    name: str,
    pp: int,
    configs: dict[str, Path],
    reference: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    """With two stages a rank, and with two directions; evaluation runs on its placement, too."""
    table = build_schedule(name, num_ranks=pp, num_microbatches=8)
    path = tmp_path / "mine.json"
    path.write_text(table_as_json(table))
    chosen = [*layout(1, pp), f"parallel.pipeline_schedule={path}"]
    chosen += ["training.eval_interval=10", "training.eval_iters=1"]
    runs = on_ranks(pp, train, configs["tied"], chosen, tmp_path, watchdog=120)
    assert_same_training(runs, reference("tied"))
    (valid,) = rows(tmp_path, "valid")
    assert 0 < valid["lm_loss"] < 10


@pytest.mark.parametrize(
    ("placements", "zero"),
    [([[1, 0]], 1), ([[1, 0]], 2), ([[0, 1, 3, 2], [3, 2, 0, 1]], 1)],
    ids=["upside-down-zero1", "upside-down-zero2", "two-ways-whose-ends-are-apart"],
)
def test_tied_tables_in_odd_places(
    placements: list[list[int]],
    zero: int,
    configs: dict[str, Path],
    reference: Callable[[str], Result],
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
    runs = on_ranks(pp, train, configs["tied"], chosen, tmp_path, watchdog=120)
    assert_same_training(runs, reference("tied"))


def test_split_and_bidirectional_gradients_are_those_of_1f1b(
    configs: dict[str, Path], tmp_path: Path
) -> None:
    """Within 1e-6 of the largest gradient of a tensor, after one step on four ranks."""
    one_step = ["training.train_iters=1", "optimizer.lr_warmup_iters=0"]
    moments = {}
    for schedule in ("1f1b", "chimera", "zb-h1", "zbv"):
        chosen = overrides(schedule, 4, 1) + one_step
        runs = on_ranks(4, train, configs["untied"], chosen, tmp_path)
        moments[schedule] = merged([run.first_moments for run in runs])
    expected = moments.pop("1f1b")
    for schedule, found in moments.items():
        for name, values in expected.items():
            atol = 1e-6 * np.abs(values).max()
            where = f"{schedule}: {name}"
            np.testing.assert_allclose(found[name], values, rtol=0, atol=atol, err_msg=where)


def refuse_drift(trainer: Trainer) -> None:
    """Fail where a save finds copies that differ."""
    report = trainer.report.saved

    def saved(found: Saved, *args: Any, **kwargs: Any) -> None:
        assert found.differing == []
        report(found, *args, **kwargs)

    trainer.report.saved = saved  # type: ignore[method-assign]


def test_checkpoints_pass_between_schedules(
    configs: dict[str, Path], reference: Callable[[str], Result], tmp_path: Path
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
        results = on_ranks(ranks, train, configs["tied"], run, tmp_path, refuse_drift, watchdog=120)
        losses += results[0].losses
    assert losses == pytest.approx(reference("tied").losses, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "culprit"), [("chimera", 3), ("zb-h1", 2), ("zbv", 1), ("interleaved", 0)]
)
def test_fp16_overflow_of_one_rank_skips_everyones_step(
    schedule: str, culprit: int, configs: dict[str, Path], tmp_path: Path
) -> None:
    chosen = overrides(schedule, 4, 2)
    chosen += ["precision.dtype=fp16", "precision.hysteresis=1", "training.train_iters=4"]
    # Not a linear layer's weight: hooks see nothing of a gradient that is put off.
    bad = ((2,), (culprit,), "input_norm.weight")
    run = alike(on_ranks(4, train_poisoned, configs["tied"], chosen, tmp_path, *bad))
    assert run.applied == run.moved == [True, False, True, True]
    assert run.scales == [65536.0, 32768.0, 32768.0, 32768.0]
