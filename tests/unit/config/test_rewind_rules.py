"""Going back needs a checkpoint to go back to."""

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
