"""Where a step's time went: made-up counts of ranks, whose bubbles are known."""

from __future__ import annotations

import pytest
import torch

from megatron_lite import stage_report
from megatron_lite.monitoring.stragglers import Worked
from megatron_lite.mpu.grid import Grid
from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.pipeline.simulate import simulate
from megatron_lite.stage_report import StageReport, StepTimes

F, B, W = 0.010, 0.020, 0.005


def report(
    monkeypatch: pytest.MonkeyPatch, name: str, grid: Grid, *, slow: float = 1.0
) -> StepTimes:
    """Of a table that runs as it is simulated; the last rank of all takes `slow` times as long for
    what it does itself, while the others wait."""
    plan = SchedulePlan.of(name, num_ranks=grid.pp_size, num_microbatches=8)
    durations = {"F": F, "B": B, "W": W}
    timeline = simulate(plan.sample, durations={k: durations[k] for k in plan.sample.kinds})
    everyones = []
    for rank in range(grid.world_size):
        factor = slow if rank == grid.world_size - 1 else 1.0
        parts: dict[tuple[str, int], float] = {}
        for action in plan.sample.actions[grid.at(rank).pp_rank]:
            part = (action.kind, action.stage)
            parts[part] = parts.get(part, 0.0) + 2 * factor * durations[action.kind]
        waited = max(0.0, 2 * timeline.makespan - sum(parts.values()))
        everyones.append(Worked(parts, waited))

    def gathered(own: list[int], device: torch.device) -> list[list[int]]:
        rows = []
        for worked in everyones:
            row = [worked.waited]
            stages = range(plan.num_stages)
            row += [worked.parts.get((k, s), 0.0) for s in stages for k in ("F", "B", "W")]
            rows.append([round(1e6 * each / 2) for each in row])
        assert rows[0] == own
        return rows

    monkeypatch.setattr(stage_report, "of_all_ranks", gathered)
    reporter = StageReport(plan, grid, torch.device("cpu"), micro_batch_size=1)
    return reporter.gather(everyones[0], iterations=2, batch=8 * grid.dp_size)


@pytest.mark.parametrize("name", ["1f1b", "chimera", "zb-h1", "zbv"])
def test_a_pipeline_that_runs_as_simulated(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    times = report(monkeypatch, name, Grid(tp_size=2, dp_size=2, pp_size=4))
    assert times.bubble == pytest.approx(times.simulated_bubble, abs=1e-3)
    if name == "1f1b":
        assert times.bubble == pytest.approx(3 / 11, abs=1e-3)
        assert times.stages[0].forward == pytest.approx(8 * F)
        assert times.stages[3].backward == pytest.approx(8 * B)
        assert times.stages[1].idle == pytest.approx(3 * (F + B))
    assert times.worked == pytest.approx([times.worked[0]] * 16, rel=1e-3)


def test_a_slow_rank_makes_a_larger_bubble_than_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = report(monkeypatch, "1f1b", Grid(pp_size=4), slow=2.0)
    assert times.bubble is not None and times.simulated_bubble is not None
    assert times.bubble > times.simulated_bubble + 0.05
    assert times.stages[3].forward == pytest.approx(16 * F)
    assert times.stages[3].idle == pytest.approx(0.0, abs=1e-6)


def test_without_a_pipeline_there_is_no_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    times = report(monkeypatch, "1f1b", Grid(dp_size=2))
    assert (times.bubble, times.simulated_bubble, times.stages) == (None, None, {})
    assert len(times.worked) == 2
