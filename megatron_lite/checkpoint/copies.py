"""Do ranks that hold copies of a tensor hold the same? Fingerprints, compared when a run saves.

Copies are norms and biases on all tensor ranks, and the table that a tied head shares with the
embedding. A copy that drifted means that the run is no longer one model, and nobody else looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_lite.checkpoint.fingerprint import Fingerprints, box_fingerprint
from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.checkpoint.manifest import STATES
from megatron_lite.mpu.grid import Grid

Holders = tuple[int, int | None]
"""Ranks that hold a copy between them: at a pipeline rank, all tensor ranks (None) or one."""
Copies = dict[Holders, Fingerprints]


def fingerprint_copies(fragments: Iterable[Fragment], grid: Grid) -> Copies:
    """One rank's part of the fingerprints of copies, which other ranks are the writers of."""
    found: Copies = {}
    for fragment in fragments:
        if fragment.placement.counted:
            continue
        for piece in fragment.pieces:
            holders = (grid.stage_holder, grid.tp_rank if piece.cut is None else None)
            for state in STATES:
                values = fragment.view(state, piece).detach().cpu().numpy()
                value = box_fingerprint(values, piece.box)
                found.setdefault(holders, Fingerprints()).add(piece.tensor, state, value)
    return found


def differing_copies(
    written: Fingerprints, everyones: Iterable[Mapping[Holders, Fingerprints]]
) -> list[str]:
    """A line for each state of a tensor whose copy somewhere is not what its writer wrote."""
    whole: Copies = {}
    for copies in everyones:
        for holders, part in copies.items():
            whole.setdefault(holders, Fingerprints()).update(part)
    lines = []
    for (place, rank), found in sorted(whole.items(), key=str):
        where = f"pipeline rank {place}"
        where += "" if rank is None else f", tensor rank {rank}"
        for (tensor, state), value in sorted(found.sums.items()):
            if written.sums.get((tensor, state)) != value:
                lines.append(f"{tensor} ({state}): the copy on {where} differs from what is saved")
    return lines
