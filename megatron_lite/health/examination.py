"""Examination: what the doctor says of a run, in lines; reads files and looks at processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.health import stacks
from megatron_lite.health.diagnosis import Diagnosis, clock, describe, diagnose
from megatron_lite.health.observation import Observation, Seen, observe
from megatron_lite.health.record import spans
from megatron_lite.outcome import FINAL, Outcome

ROWS = 64
"""Ranks that the table shows unless all are asked for."""


@dataclass(frozen=True)
class Examination:
    """A run as the doctor found it."""

    run_dir: Path
    status: dict[str, object]
    seen: Observation
    found: Diagnosis

    @classmethod
    def of(cls, run_dir: Path, *, moves_within: float) -> Examination:
        """Look at a run; ValueError where there is none, or its files are damaged."""
        seen = observe(run_dir)
        found = diagnose(seen, moves_within=moves_within)
        return cls(run_dir, Outcome(run_dir, rank=0).read(), seen, found)

    @property
    def well(self) -> bool:
        """All ranks move, or have come to their end."""
        failed = self.status.get("state") in FINAL
        return not (self.found.lagging or self.found.hangs or self.found.silent or failed)

    def in_short(self) -> str:
        """What is not well, in some words."""
        if self.found.lagging:
            lagging = [lag.rank for lag in self.found.lagging]
            return f"{spans(lagging)} lag{'s' * (len(lagging) == 1)}"
        if self.status.get("state") in FINAL:
            return "the run failed"
        return "nothing moves" if self.found.hangs else "all processes are gone"

    def lines(self, *, all_ranks: bool) -> Iterator[str]:
        """The answer first, then a line for each rank."""
        state = self.status.get("state", "no status yet")
        starts = max((s.record.facts.restart for s in self.seen.ranks.values()), default=0)
        yield (
            f"{self.run_dir}: {state}, {self.seen.world_size} ranks"
            f"{f', restart {starts}' if starts else ''}"
        )
        if self.status.get("state") in FINAL:
            yield f"rank {self.status.get('rank')} ended it: {self.status.get('error')}"
        if self.found.silent:
            last = max(s.record.pulse.time for s in self.seen.ranks.values())
            yield (
                f"no heartbeat beats, the last one did at {clock(last)}: the processes are gone, "
                "or all hang in C code"
            )
        yield from describe(self.found, self.seen)
        yield ""
        yield from self._table(all_ranks=all_ranks)

    def _table(self, *, all_ranks: bool) -> Iterator[str]:
        lagging = {lag.rank for lag in self.found.lagging}
        ordered = sorted(self.seen.ranks.items(), key=lambda pair: (pair[0] not in lagging, pair))
        shown = ordered if all_ranks else ordered[:ROWS]
        head = ("rank", "node", "process", "state", "iteration", "phase", "doing", "since", "still")
        rows = [(*head, "waits for"), *(self._row(rank, one) for rank, one in shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        if len(shown) < len(ordered):
            yield f"and {len(ordered) - len(shown)} more; --all shows them"

    def _row(self, rank: int, one: Seen) -> tuple[str, ...]:
        facts, position, pulse = one.record.facts, one.record.position, one.record.pulse
        state = "gone" if one.gone else "" if one.ended else one.state or ""
        waits = self.found.waits[rank]
        return (
            str(rank),
            facts.machine,
            str(facts.pid),
            f"{state}{'' if one.beats or one.ended else ' no beat'}".strip(),
            str(position.iteration),
            position.phase,
            position.doing,
            clock(position.since),
            f"{pulse.still:.0f} s",
            spans(waits) if waits else "",
        )

    def stack_lines(self, *, ask: bool) -> list[str]:
        """The stacks that ranks wrote, those of lagging ranks first; `ask` this machine's for new
        ones before, but for stopped processes, which can't answer."""
        starts: dict[int, int | None] = dict.fromkeys(lag.rank for lag in self.found.lagging)
        starts |= dict.fromkeys(rank for rank in self.seen.ranks if rank not in starts)
        if ask:
            here = {
                rank: one.record.facts.pid
                for rank, one in self.seen.ranks.items()
                if one.state and not one.gone and not one.stopped and one.record.facts.born
            }
            starts |= stacks.ask(self.run_dir, here)
        return stacks.lines(self.run_dir, starts)
