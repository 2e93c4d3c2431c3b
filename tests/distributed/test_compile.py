"""Compiled layers and loss train the model that the plain ones train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, train
from tests.distributed.test_parity import assert_same_training, layout


@pytest.mark.parametrize(("model", "tp"), [("gpt", 1), ("llama", 2)])
def test_compiled_training_is_the_same(
    model: str,
    tp: int,
    configs: dict[str, Path],
    one_process: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    reference = one_process(model)
    overrides = [*layout(tp, 1, 1, "none"), "training.compile=true"]
    runs = on_ranks(tp, train, configs[model], overrides, tmp_path, watchdog=300)
    assert_same_training(runs, reference)
