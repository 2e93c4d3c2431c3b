"""The pipeline benchmark runs. Its times are worth nothing here; what it counts is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.pipeline.simulate import simulate
from megatron_lite.pipeline.verify import verify

ROOT = Path(__file__).resolve().parents[3]
SCHEDULES = ("1f1b", "zbv")
"""One that torch.distributed.pipelining has on a stage a rank, and one on two with a split."""


def test_the_benchmark_runs() -> None:
    """Live activations are as many as the verifier says, on each rank."""
    command = [sys.executable, "tests/benchmarks/pipeline.py", "--quick"]
    done = subprocess.run(
        [*command, "--schedules", *SCHEDULES],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["quick"] is True
    assert sorted(told["bubble"]) == sorted(told["ratio_vs_torch"]) == sorted(SCHEDULES)
    assert all(ratio > 0 for ratio in told["ratio_vs_torch"].values())
    assert [row["schedule"] for row in told["rows"]] == list(SCHEDULES)
    for row in told["rows"]:
        table = SchedulePlan.of(
            row["schedule"], num_ranks=4, num_microbatches=row["micro_batches"]
        ).sample
        assert tuple(row["peak_activations"]) == verify(table).peak_activations
        bubble = told["bubble"][row["schedule"]]
        assert 0 < bubble["measured"] < 1
        split = {"B": 10.0, "W": 10.0} if table.split_backward else {"B": 20.0}
        expected = simulate(table, durations={"F": 10.0, **split}).bubble_fraction
        assert abs(bubble["simulated"] - expected) < 1e-9
        assert row["message_ms"] > 0 and bubble["with_messages"] > bubble["simulated"]
