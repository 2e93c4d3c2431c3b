"""Judge: rank 0 collects what is wrong, all ranks hear the same verdict. Used by both checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.health.preflight.exchange import Exchange
from megatron_lite.health.preflight.record import FILE, Record

GRACE = 10.0
"""Seconds that a rank waits for rank 0's word beyond what rank 0 itself may need."""

SHOWN = 20
"""Faults in an error's text."""


class PreflightFailed(Exception):
    """The nodes are not fit for the run; says which ranks on which nodes, the same on all ranks."""

    def __init__(self, message: str, *, silence: bool = False) -> None:
        super().__init__(message)
        self.silence = silence
        """Whether rank 0 found that some ranks say nothing, which another start may mend."""

    @classmethod
    def of(cls, faults: Sequence[str], *, silence: bool = False) -> PreflightFailed:
        """With one or several faults."""
        return cls(cls._told(faults), silence=silence)

    @staticmethod
    def _told(faults: Sequence[str]) -> str:
        if len(faults) == 1:
            return f"preflight: {faults[0]}"
        lines = [f"preflight: {len(faults)} faults:", *faults[:SHOWN]]
        if len(faults) > SHOWN:
            lines.append(f"and {len(faults) - SHOWN} more: see {FILE} in the run folder")
        return "\n  ".join(lines)


class Judge:
    """One rank's end; the `record` is rank 0's."""

    def __init__(self, exchange: Exchange, run_dir: Path) -> None:
        self.exchange, self.record, self._run_dir = exchange, Record(), run_dir
        self.silence = False
        """Whether some ranks have told nothing in time."""

    @property
    def presides(self) -> bool:
        """Whether this is rank 0."""
        return self.exchange.rank == 0

    def answered(self, topic: str, limit: float) -> Any:
        """Rank 0's answer; PreflightFailed where it does not come."""
        try:
            return self.exchange.answered(topic, limit=limit)
        except TimeoutError as error:
            raise PreflightFailed.of([str(error)]) from None

    def silent(self, told: Mapping[int, Any]) -> list[int]:
        """The ranks that have not told anything."""
        ranks = [rank for rank in range(self.exchange.world_size) if rank not in told]
        self.silence |= bool(ranks)
        return ranks

    def settle(self, topic: str, limit: float) -> None:
        """Pronounce the faults so far, or wait for that; PreflightFailed on all ranks if any."""
        if self.presides:
            faults = self.pronounce(self.exchange, topic)
        else:
            faults = self.answered(topic, limit)
        if faults:
            raise PreflightFailed.of(faults, silence=self.silence)

    def finish(self) -> None:
        """Rank 0: tell what was found and keep it."""
        if self.presides:
            self.record.write(self._run_dir)
            self.record.tell()

    def pronounce(self, exchange: Exchange, topic: str) -> list[str]:
        """Rank 0: say the faults so far to all. With faults the record is kept as it is."""
        faults = self.record.findings.faults
        if faults:
            self.record.write(self._run_dir)
            self.record.warn()
        exchange.answer(topic, faults)
        return faults
