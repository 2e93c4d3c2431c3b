"""Do ranks that hold copies of a tensor hold the same? Fingerprints, compared when a run saves.

Copies are norms and biases on all tensor ranks, and the table that a tied head shares with the
embedding. A copy that drifted means that the run is no longer one model, and nobody else looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_lite.checkpoint.fingerprint import Fingerprints, box_fingerprint
from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.checkpoint.manifest import STATES
from megatron_lite.checkpoint.tensor_file import Values
from megatron_lite.mpu.grid import Grid
from megatron_lite.sharding.placement import Piece


def names_of_copies(fragments: Iterable[Fragment]) -> set[str]:
    """The tensors of which this rank holds parts that another rank is the writer of."""
    return {piece.tensor for f in fragments if not f.placement.counted for piece in f.pieces}


@dataclass
class CopyHashes:
    """Of one rank: fingerprints of its copies, and of what it holds that others have copies of.

    Tensor ranks hold either a shard each or the whole tensor each, so what can be compared is a
    tensor rank's part of the one, and the whole of the other.
    """

    grid: Grid
    counted: Fingerprints = field(default_factory=Fingerprints)
    copies: Fingerprints = field(default_factory=Fingerprints)

    def add(self, piece: Piece, state: str, values: Values, *, counted: bool) -> None:
        """Count one piece in."""
        part = "" if piece.cut is None else f" shard {self.grid.tp_rank}"
        into = self.counted if counted else self.copies
        into.add(piece.tensor + part, state, box_fingerprint(values, piece.box))

    def add_copies(self, fragments: Iterable[Fragment]) -> None:
        """Count all pieces in that another rank writes."""
        for fragment in fragments:
            if fragment.placement.counted:
                continue
            for piece in fragment.pieces:
                for state in STATES:
                    values = fragment.view(state, piece).detach().cpu().numpy()
                    self.add(piece, state, values, counted=False)


def differing_copies(everyones: Iterable[CopyHashes]) -> list[str]:
    """A line for each state of a tensor and each model rank whose copy is not its writer's."""
    counted = Fingerprints()
    copies: dict[tuple[int, int], Fingerprints] = {}
    for hashes in everyones:  # the data-parallel ranks of a model rank hold its parts
        counted.update(hashes.counted)
        place = (hashes.grid.pp_rank, hashes.grid.tp_rank)
        copies.setdefault(place, Fingerprints()).update(hashes.copies)
    return [
        f"{tensor} ({state}): the copy on stage {stage}, tensor rank {rank} differs"
        for (stage, rank), held in copies.items()
        for (tensor, state), value in sorted(held.sums.items())
        if counted.sums.get((tensor, state)) != value
    ]
