"""What a preflight found: kept by rank 0, told in a few lines, written to preflight.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.health.preflight.clocks import Skew
from megatron_lite.health.preflight.comparison import Findings, Reading
from megatron_lite.health.preflight.facts import Facts

FILE = "preflight.json"
NODES_LISTED = 8
_SAID = ("python", "torch", "deepspeed", "code")


@dataclass
class Record:
    """Everything that rank 0 came to know."""

    facts: dict[int, Facts] = field(default_factory=dict)
    skews: dict[int, Skew] = field(default_factory=dict)
    """By one rank of each node but rank 0's."""
    readings: list[Reading] = field(default_factory=list)
    """One a group."""
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0
    """Spent on all of it."""

    @property
    def nodes(self) -> dict[int, str]:
        """Each rank's node."""
        return {rank: facts.node for rank, facts in self.facts.items()}

    def add(self, findings: Findings) -> None:
        """Take note of what is wrong."""
        self.findings.faults += findings.faults
        self.findings.warnings += findings.warnings

    def write(self, run_dir: Path) -> None:
        """Leave it in the run folder, if that is possible: that it is not is one of the faults."""
        with suppress(OSError):
            (run_dir / FILE).write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values; what all ranks have alike is there once."""
        every = [asdict(facts) for facts in self.facts.values()]
        common = {
            part: _common([own[part] for own in every]) for part in ("must_agree", "should_agree")
        }
        for own in every:
            for part, alike in common.items():
                own[part] = {name: v for name, v in own[part].items() if name not in alike}
        return {
            "faults": self.findings.faults,
            "warnings": self.findings.warnings,
            "seconds": self.seconds,
            "all_ranks": common,
            "ranks": dict(zip(map(str, self.facts), every, strict=True)),
            "clock_skews": {str(rank): asdict(skew) for rank, skew in self.skews.items()},
            "groups": [asdict(reading) for reading in self.readings],
        }

    def tell(self) -> None:
        """Print what was found, with all warnings."""
        self.warn()
        for line in self.lines():
            print(line, flush=True)

    def warn(self) -> None:
        """Print the warnings alone."""
        for line in self.findings.warnings:
            print(f"warning: preflight: {line}", file=sys.stderr, flush=True)

    def lines(self) -> list[str]:
        """The block for the start of a run."""
        first = self.facts[0]
        names = list(dict.fromkeys(self.nodes.values()))
        more = f" and {len(names) - NODES_LISTED} more" if len(names) > NODES_LISTED else ""
        lines = [
            [
                f"{len(self.facts)} rank{_s(self.facts)} on {len(names)} node{_s(names)}: "
                f"{', '.join(names[:NODES_LISTED])}{more}",
                ", ".join(f"{name} {first.must_agree[name]}" for name in _SAID),
                first.should_agree.get("device", "CPU"),
            ],
            [f"free: {', '.join(self._free())}", *self._clocks()],
        ]
        if self.readings:
            kinds = ", ".join(_speeds(self.readings))
            lines.append([f"all-reduce in GB/s: {kinds}"])
        lines[-1].append(f"{self.seconds:.2f} s")
        return [f" preflight | {' | '.join(parts)} |" for parts in lines]

    def _free(self) -> Iterable[str]:
        for name in self.facts[0].free:
            least = min(own.free[name] for own in self.facts.values() if name in own.free)
            yield f"{name} {least / 1e9:.1f} GB"

    def _clocks(self) -> Iterable[str]:
        if self.skews:
            yield f"clocks within {1000 * max(s.at_least for s in self.skews.values()):.0f} ms"


def _common(values: list[dict[str, str]]) -> dict[str, str]:
    first, *rest = values or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in rest)
    }


def _speeds(readings: Iterable[Reading]) -> Iterable[str]:
    kinds: dict[str, list[float]] = {}
    for reading in readings:
        kinds.setdefault(reading.kind, []).append(reading.gb_per_second)
    for kind, speeds in kinds.items():
        low, high = min(speeds), max(speeds)
        if len(speeds) == 1:
            yield f"{kind} {low:.2f}"
        else:
            yield f"{kind} {low:.2f} to {high:.2f} ({len(speeds)} groups)"


def _s(things: Any) -> str:
    return "" if len(things) == 1 else "s"
