"""Going back needs a checkpoint to go back to, a comparison something to compare."""

from __future__ import annotations

import pytest

SAVING = {"checkpoint": {"save": "c", "save_interval": 5}}
SPIKE = {"loss_spike": {"action": "rewind"}}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"training": {"on_nan": "rewind"}}, "training.on_nan", "needs checkpoint.save"),
        (
            {"training": SPIKE, "checkpoint": {"save": "c"}},
            "training.loss_spike.action",
            "needs checkpoints on the way: checkpoint.save_interval is 0",
        ),
        (
            {"training": {"on_nan": "stop", "max_rewinds": 5}, **SAVING},
            "training.max_rewinds",
            'no effect without "rewind" in training.on_nan or training.loss_spike.action',
        ),
        (
            {"training": {"loss_spike": {"action": "log"}, "rewind_batches": 5}},
            "training.rewind_batches",
            "no effect without",
        ),
    ],
)
def test_refused(problems, changes, path: str, words: str) -> None:
    found = problems(changes)
    assert found.keys() == {path} and words in found[path].rule


def test_accepted(load) -> None:
    load({"training": {"on_nan": "rewind", "rewind_batches": 5}, **SAVING})
    load({"training": SPIKE | {"max_rewinds": 1}, **SAVING})


@pytest.mark.parametrize(
    ("parallel", "stage", "world_size", "compares"),
    [
        ({}, 1, 1, False),
        ({}, 1, 2, True),
        ({}, 3, 2, False),
        ({"tensor_model_parallel_size": 2}, 3, 2, True),
        ({"pipeline_model_parallel_size": 2}, 1, 2, True),
    ],
)
def test_a_check_of_replicas_without_replicas(
    load, parallel: dict, stage: int, world_size: int, *, compares: bool
) -> None:
    changes = {
        "parallel": parallel,
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "training": {"check_replicas_interval": 5},
    }
    lines = load(changes, world_size=world_size).warnings
    assert any("nothing to compare" in line for line in lines) != compares
