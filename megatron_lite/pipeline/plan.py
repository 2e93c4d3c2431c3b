"""SchedulePlan: which stages of a run's model are on which rank, and the tables that run them.

Pure. Made by build.py from the config; the trainer asks it for a table at each number of
micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from megatron_lite.pipeline.actions import Schedule
from megatron_lite.pipeline.schedules import build_schedule, forward_only


@dataclass
class SchedulePlan:
    """The tables of one run. `sample` is any training table of it: all have its placements."""

    name: str
    sample: Schedule
    virtual: int | None = None
    _tables: dict[int, Schedule] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, *, num_ranks: int, num_microbatches: int, virtual: int | None = None
    ) -> SchedulePlan:
        """For a schedule's name; ScheduleError where it can't be run with these sizes."""
        table = build_schedule(
            name,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            virtual=virtual,
        )
        return cls(name, table, virtual, {num_microbatches: table})

    @property
    def num_stages(self) -> int:
        """Parts into which the model is cut."""
        return self.sample.num_stages

    @property
    def bidirectional(self) -> bool:
        """Whether two pipelines run against each other."""
        return len(self.sample.placements) > 1

    @property
    def ends(self) -> tuple[int, int]:
        """The ranks of the first and the last stage."""
        placement = self.sample.placements[0]
        return placement[0], placement[-1]

    @property
    def neighbours(self) -> set[tuple[int, int]]:
        """The ordered pairs of ranks between which messages travel."""
        return {
            pair
            for placement in self.sample.placements
            for one, other in pairwise(placement)
            for pair in ((one, other), (other, one))
            if one != other
        }

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, of all directions, ascending."""
        return sorted({stage for _, stage in self.sample.held_by(rank)})

    def training(self, num_microbatches: int) -> Schedule:
        """The table of a training step, verified; ScheduleError where there is none."""
        if num_microbatches not in self._tables:
            other = self.of(
                self.name,
                num_ranks=self.sample.num_ranks,
                num_microbatches=num_microbatches,
                virtual=self.virtual,
            )
            self._tables[num_microbatches] = other.sample
        return self._tables[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Schedule:
        """The table of an evaluation, in the first direction."""
        return forward_only(self.sample.placements[0], num_microbatches)
