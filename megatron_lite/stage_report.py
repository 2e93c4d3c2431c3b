"""StageReport: where the time of a step went, rank by rank and stage by stage.

Puts together what the ranks' clocks counted; all of them ask together at a log step. Called by
the reporter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch

from megatron_lite.config.batch import num_microbatches
from megatron_lite.monitoring.scalars import StageTimes
from megatron_lite.monitoring.stragglers import Worked
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.reductions import of_all_ranks
from megatron_lite.pipeline.actions import Kind, Schedule
from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.pipeline.simulate import simulate

KINDS: tuple[Kind, ...] = ("F", "B", "W")
Counts = Sequence[Sequence[int]]
"""Microseconds of each rank: those it waited, then of each stage those of each of KINDS."""


@dataclass(frozen=True)
class StepTimes:
    """Of the iterations of a lap, seconds an iteration."""

    worked: list[float]
    """Each rank's own work."""
    stages: dict[int, StageTimes] = field(default_factory=dict)
    """The mean over the ranks that hold a stage. Empty without a pipeline."""
    bubble: float | None = None
    """Idle time / (ranks x time) of the forwards and backwards, the mean over all pipelines."""
    simulated_bubble: float | None = None
    """The schedule's own, were all actions of a kind as long as they are in the mean."""


@dataclass(frozen=True)
class StageReport:
    """Knows who holds what."""

    plan: SchedulePlan
    grid: Grid
    device: torch.device
    micro_batch_size: int

    def gather(self, worked: Worked, *, iterations: int, batch: int) -> StepTimes:
        """What all ranks counted in `iterations` steps; the last one had `batch` samples."""
        own = [worked.waited]
        own += [worked.parts.get((k, s), 0.0) for s in range(self.plan.num_stages) for k in KINDS]
        counts = of_all_ranks([round(1e6 * each / iterations) for each in own], self.device)
        of_ranks = [sum(row[1:]) / 1e6 for row in counts]
        if self.plan.sample.num_ranks == 1:
            return StepTimes(of_ranks)
        count = num_microbatches(batch, self.micro_batch_size, self.grid.dp_size)
        return StepTimes(
            of_ranks,
            self._stages(counts),
            mean(self._bubble(counts, ranks) for ranks in self.grid.all_groups("pp")),
            simulated_bubble(self.plan.training(count), counts),
        )

    def _bubble(self, counts: Counts, ranks: Sequence[int]) -> float:
        """Of one pipeline, whose ranks begin together; the last one's end is the step's."""
        longest = self._longest(counts, ranks)
        return 1 - sum(sum(counts[r][1:]) for r in ranks) / (len(ranks) * longest)

    @staticmethod
    def _longest(counts: Counts, ranks: Sequence[int]) -> int:
        return max(1, *(sum(counts[rank]) for rank in ranks))

    def _stages(self, counts: Counts) -> dict[int, StageTimes]:
        found: dict[int, list[StageTimes]] = {s: [] for s in range(self.plan.num_stages)}
        for ranks in self.grid.all_groups("pp"):
            longest = self._longest(counts, ranks)
            for place, rank in enumerate(ranks):
                idle = longest - sum(counts[rank][1:])
                for stage in self.plan.stages_of(place):
                    forward, *backward = counts[rank][1 + 3 * stage : 4 + 3 * stage]
                    times = (forward, sum(backward), idle)
                    found[stage].append(StageTimes(*(t / 1e6 for t in times)))
        return {
            stage: StageTimes(*(mean(getattr(t, name) for t in times) for name in _NAMES))
            for stage, times in found.items()
        }


_NAMES = ("forward", "backward", "idle")


def simulated_bubble(table: Schedule, counts: Counts) -> float | None:
    """Of a table whose actions take the mean of their kind; None where some took no time yet."""
    taken = {kind: sum(sum(row[1 + i :: 3]) for row in counts) for i, kind in enumerate(KINDS)}
    number = Counter(action.kind for row in table.actions for action in row)
    durations = {kind: taken[kind] / number[kind] for kind in table.kinds}
    if min(durations.values()) <= 0:
        return None
    return simulate(table, durations=durations).bubble_fraction
