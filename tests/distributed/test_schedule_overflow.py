"""fp16 under every schedule: one rank's overflow skips everyone's step."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.distributed.faults import train_poisoned
from tests.distributed.ranks import on_ranks
from tests.distributed.schedules import MODELS, SCHEDULES, overrides
from tests.distributed.test_fp16 import alike

MATRIX = list(product(SCHEDULES, MODELS, (2, 4), (1, 2), (1, 2)))
COVERING = {
    ("interleaved", "tied", 4, 1, 2),
    ("chimera", "tied", 4, 1, 2),
    ("chimera", "untied", 2, 2, 1),
    ("zb-h1", "tied", 4, 1, 2),
    ("zbv", "tied", 4, 1, 2),
    ("dualpipev", "untied", 2, 2, 1),
}
"""GPipe and 1F1B are in test_fp16's."""


def _case(case: tuple[str, str, int, int, int]) -> object:
    schedule, model, pp, dp, zero = case
    marks = [] if case in COVERING else [pytest.mark.every]
    culprit = SCHEDULES.index(schedule) % (pp * dp)
    where = f"{schedule}-{model}-pp{pp}-dp{dp}-zero{zero}-rank{culprit}"
    return pytest.param(*case, culprit, marks=marks, id=where)


@pytest.mark.parametrize(
    ("schedule", "model", "pp", "dp", "zero", "culprit"),
    [_case(case) for case in MATRIX],
)
def test_overflow_of_one_rank_skips_everyones_step(
    schedule: str,
    model: str,
    pp: int,
    dp: int,
    zero: int,
    culprit: int,
    deep_configs: dict[str, Path],
    tmp_path: Path,
) -> None:
    chosen = overrides(schedule, pp, zero)
    chosen += ["precision.dtype=fp16", "precision.hysteresis=1", "training.train_iters=4"]
    # A split backward gives the one with its first half, the other with its second.
    bad = ((2,), (culprit,), "input_norm.weight" if zero == 1 else "mlp.down.weight")
    found = on_ranks(
        pp * dp, train_poisoned, deep_configs[model], chosen, tmp_path, *bad, watchdog=120
    )
    run = alike(found)
    assert run.applied == run.moved == [True, False, True, True]
    assert run.scales == [65536.0, 32768.0, 32768.0, 32768.0]
