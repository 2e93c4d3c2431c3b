"""One step's gradients do not depend on the schedule, nor on where a tied table's ends are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.distributed.many import Run, train_on
from tests.distributed.runs import merged
from tests.distributed.schedules import MODELS, SPLIT, overrides

ONE_STEP = ["training.train_iters=1", "optimizer.lr_warmup_iters=0"]


def test_split_and_bidirectional_gradients_are_those_of_1f1b(
    deep_configs: dict[str, Path], tmp_path: Path
) -> None:
    """Within 1e-6 of the largest gradient of a tensor, after one step on four ranks.

    Tied, the table is one parameter where the first and the last stage share a rank (chimera, zbv,
    dualpipev), and two copies elsewhere.
    """
    cases = [(model, name) for model in MODELS for name in ("1f1b", "chimera", *SPLIT)]
    runs = [Run(deep_configs[model], overrides(name, 4, 1) + ONE_STEP) for model, name in cases]
    found = train_on(4, runs, tmp_path)
    moments = {
        case: merged([result.first_moments for result in results])
        for case, results in zip(cases, found, strict=True)
    }
    for model, name in cases:
        expected, here = moments[model, "1f1b"], moments[model, name]
        assert here.keys() == expected.keys()
        for tensor, values in expected.items():
            atol = 1e-6 * np.abs(values).max()
            where = f"{name}, {model}: {tensor}"
            np.testing.assert_allclose(here[tensor], values, rtol=0, atol=atol, err_msg=where)


def test_a_tied_table_in_one_piece_gets_the_16_bit_gradients_of_two(
    configs: dict[str, Path], tmp_path: Path
) -> None:
    """In bf16 with float32 sums: one rank with one stage, with a split backward, and two ranks."""
    chosen = [*ONE_STEP, "precision.dtype=bf16"]
    runs = [Run(configs["gpt"], overrides(name, 1, 1) + chosen) for name in ("1f1b", "zb-h1")]
    alone = [result.first_moments for (result,) in train_on(1, runs, tmp_path)]
    (two,) = train_on(2, [Run(configs["gpt"], overrides("1f1b", 2, 1) + chosen)], tmp_path)
    expected = merged([result.first_moments for result in two])
    for found in alone:
        for tensor, values in expected.items():
            atol = 1e-6 * np.abs(values).max()
            np.testing.assert_allclose(found[tensor], values, rtol=0, atol=atol, err_msg=tensor)
