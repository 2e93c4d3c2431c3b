"""An exception amid a schedule, in one stage, ends all ranks with that stage's error."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.distributed.processes import arguments, fork_main, torchrun
from tests.distributed.schedules import LAYERS, overrides
from tests.distributed.small import rows, small_config

GONE = 30.0
"""Seconds after the last step that was logged within which nobody may be left."""
FAULTS = [("zbv", "W", 2), ("chimera", "B", 1), ("interleaved", "F", 3), ("dualpipev", "B", 0)]
"""A schedule, the action and the rank that fails in it."""
DEFAULT = FAULTS[:2]


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that would go on for ever."""
    return small_config(
        tmp_path_factory.mktemp("failures") / "run.json",
        corpus,
        model={"num_layers": LAYERS},
        training={"train_iters": 1_000_000},
    )


def check(run_dir: Path, rank: int) -> None:
    """The run has just ended, in time, because of `rank`."""
    assert time.time() - (run_dir / "metrics.jsonl").stat().st_mtime < GONE
    assert len(rows(run_dir)) == 2, "the third iteration failed"
    found = json.loads((run_dir / "status.json").read_text())
    assert (found["state"], found["rank"]) == ("failed", rank)
    assert found["error"] == "ArithmeticError: a planned fault"


@pytest.mark.parametrize(
    ("schedule", "action", "rank"),
    [pytest.param(*f, marks=[] if f in DEFAULT else pytest.mark.every) for f in FAULTS],
)
def test_all_ranks_end_by_themselves(
    schedule: str, action: str, rank: int, config: Path, tmp_path: Path
) -> None:
    """No launcher ends them, as under srun."""
    argv = arguments(config, tmp_path, *overrides(schedule, 4, 1))
    ended = fork_main(argv, processes=4, env={"FAULT": f"{action}:{rank}:3"})
    check(tmp_path, rank)
    assert [one.code for one in ended] == [1] * 4
    for number, one in enumerate(ended):
        told = f"rank {rank} failed:" if number == rank else f"because of rank {rank}: Arithmetic"
        assert told in one.err, one.err
    assert "in _backward" in ended[rank].err or "in _forward" in ended[rank].err


@pytest.mark.every
@pytest.mark.parametrize(("schedule", "action", "rank"), FAULTS)
def test_all_ranks_end_under_a_launcher(
    schedule: str, action: str, rank: int, config: Path, tmp_path: Path
) -> None:
    env = {"FAULT": f"{action}:{rank}:3"}
    chosen = overrides(schedule, 4, 2)
    with torchrun(4, config, tmp_path, *chosen, module="tests.distributed.faulty", env=env) as job:
        code, _, err = job.finish()
        job.wait_until_empty(GONE)
        check(tmp_path, rank)
    assert code != 0
    assert f"rank {rank} failed:" in err
