"""Schedules beside everything else: tensor and sequence parallelism, offload, 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.distributed.many import Run, train_on
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, train
from tests.distributed.schedules import MODELS, SPLIT, overrides
from tests.distributed.test_parity import assert_same_training

SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
SIZES = ((2, 1, 2), (4, 1, 1), (2, 2, 1), (2, 2, 2))
"""Pipeline, data and ZeRO's stage."""
MATRIX = list(product(("chimera", *SPLIT), MODELS, SIZES, (False, True)))
COVERING = {
    ("zb-h1", "tied", (2, 1, 2), False),
    ("zbv", "untied", (2, 1, 2), True),
    ("chimera", "tied", (2, 2, 2), True),
}
"""Weight gradients that wait in a group of two, and gather their input then or not; pairs of ranks,
tensor-parallel ranks and replicas at once."""


def _case(case: tuple[str, str, tuple[int, int, int], bool]) -> object:
    schedule, model, (pp, dp, zero), sequence = case
    marks = [] if case in COVERING else [pytest.mark.every]
    where = f"{schedule}-{model}-pp{pp}-dp{dp}-zero{zero}{'-sequence' if sequence else ''}"
    return pytest.param(schedule, model, pp, dp, zero, sequence, marks=marks, id=where)


@pytest.mark.parametrize(
    ("schedule", "model", "pp", "dp", "zero", "sequence"), [_case(c) for c in MATRIX]
)
def test_two_tensor_parallel_ranks(
    schedule: str,
    model: str,
    pp: int,
    dp: int,
    zero: int,
    sequence: bool,
    deep_configs: dict[str, Path],
    deep_reference: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    chosen = overrides(schedule, pp, zero, tp=2)
    chosen += [SEQUENCE_PARALLEL] if sequence else []
    runs = on_ranks(2 * pp * dp, train, deep_configs[model], chosen, tmp_path, watchdog=180)
    assert_same_training(runs, deep_reference(model))


def _marked(covering: set[tuple[object, ...]], *choices: tuple[object, ...]) -> list[object]:
    """All combinations; those that are not in `covering` belong to the whole matrix."""
    return [
        pytest.param(*case, marks=[] if case in covering else [pytest.mark.every])
        for case in product(*choices)
    ]


@pytest.mark.parametrize(("model", "zero"), _marked({("tied", 2)}, tuple(MODELS), (1, 2)))
def test_offloaded_optimizers(
    model: str,
    zero: int,
    deep_configs: dict[str, Path],
    deep_reference: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    """With pairs of ranks that share partitions and with split backwards, in fp32."""
    runs = [
        Run(deep_configs[model], overrides(name, 2, zero, offload="cpu"))
        for name in ("chimera", *SPLIT)
    ]
    for results in train_on(2, runs, tmp_path):
        assert_same_training(results, deep_reference(model))


@pytest.mark.parametrize(
    ("dtype", "model", "zero", "offload"),
    _marked(
        {("bf16", "untied", 2, "cpu"), ("fp16", "tied", 1, "none")},
        *(("bf16", "fp16"), tuple(MODELS), (1, 2), ("none", "cpu")),
    ),
)
def test_split_backwards_in_16_bits(
    dtype: str, model: str, zero: int, offload: str, deep_configs: dict[str, Path], tmp_path: Path
) -> None:
    """They add up the same products as 1F1B: bit for bit with two tables, and tied but for the one
    rounding of the sum of its two copies of the table."""
    more = [f"precision.dtype={dtype}", "training.train_iters=4"]
    runs = [
        Run(deep_configs[model], [*overrides(name, 2, zero, offload=offload), *more])
        for name in ("1f1b", *SPLIT)
    ]
    (expected, *_), *found = train_on(2, runs, tmp_path)
    rounding = 0.0 if model == "untied" else 1.0
    for result in (result for results in found for result in results):
        assert result.applied == [True] * 4
        assert result.losses == pytest.approx(expected.losses, rel=1e-5 * rounding, abs=0)
        assert result.norms == pytest.approx(expected.norms, rel=1e-4 * rounding, abs=0)
