"""Findings of non-finite values as facts for RUN_DIR/nonfinite/*.json, and in words.

Holds no decision and makes no collective call. Called by forensics.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lite.data.provenance import Origin
from megatron_lite.mpu.grid import Grid
from megatron_lite.numerics.nonfinite import Finding


@dataclass(frozen=True)
class Seen:
    """What one rank found when a step was run again, and saw of the step itself."""

    node: str
    found: list[Finding]
    """The first ones."""
    micro_batches: list[int]
    """All in which something was not finite."""
    bad_losses: list[int]
    """Micro-batches whose loss in the step was not finite."""


def finding_facts(
    finding: Finding, grid: Grid, node: str, *, layer: int | None, samples: Sequence[Origin] | None
) -> dict[str, Any]:
    """A finding of the rank that `grid` is seen from, as JSON values.

    `samples` are those of its micro-batch, None where it belongs to none.
    """
    return {
        "text": in_words(finding, grid.rank),
        "rank": grid.rank,
        "node": node,
        **{f"{axis}_rank": place for axis, place in grid.coordinates.items()},
        "phase": finding.phase,
        "micro_batch": finding.micro_batch,
        "stage": finding.stage,
        "layer": layer,
        "name": finding.name or f"stage {finding.stage}",
        "tensor": finding.tensor,
        "values": None if finding.values is None else asdict(finding.values),
        "samples": None if samples is None else [_origin_facts(origin) for origin in samples],
    }


def in_words(finding: Finding, rank: int) -> str:
    """Who found what where: `rank 3 (stage 1): layers.1.mlp.down, output in the forward of …`."""
    where = {
        "weight": "before the step",
        "forward": f"in the forward of micro-batch {finding.micro_batch}",
        "backward": f"in the backward of micro-batch {finding.micro_batch}",
        "sum": "as the sum over micro-batches, each of which is finite",
    }[finding.phase]
    name = finding.name or "the stage"
    values = "" if finding.values is None else f": {finding.values}"
    return f"rank {rank} (stage {finding.stage}): {name}, {finding.tensor} {where}{values}"


def irreproducible(everyones: Sequence[Seen]) -> str:
    """What is known of a step in which nothing was bad when it was run again."""
    losses = [
        f"rank {rank} on {seen.node}, loss of micro-batch {seen.bad_losses[0]}"
        for rank, seen in enumerate(everyones)
        if seen.bad_losses
    ]
    known = f" Not finite in the step itself: {'; '.join(losses)}." if losses else ""
    return (
        "Run again, every value of every rank was finite: not reproducible, so perhaps a fault of "
        "hardware or communication, or a sum over data-parallel ranks beyond the number format."
        f"{known}"
    )


def _origin_facts(origin: Origin) -> dict[str, Any]:
    return {
        "sample": origin.sample,
        "source": origin.source,
        "number": origin.number,
        "documents": [
            {"document": document, "first_token": offset, "tokens": length}
            for document, offset, length in origin.pieces
        ],
        "text": ", ".join(line.strip() for line in origin.lines()),
    }


def write_facts(folder: Path, iteration: int, facts: Mapping[str, Any]) -> str | None:
    """Write `<folder>/iteration_<iteration>.json`; returns its path, None where that failed.

    An iteration that a rewind or a new start repeats gets a file of its own. That a disk is full
    is no reason to lose what the console and status.json tell as well.
    """
    path, again = folder / f"iteration_{iteration}.json", 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while path.exists():
            path, again = folder / f"iteration_{iteration}_{again}.json", again + 1
        path.write_text(json.dumps(_plain(facts), indent=1, allow_nan=False) + "\n")
    except OSError:
        return None
    return str(path)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text, as in metrics.jsonl."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
