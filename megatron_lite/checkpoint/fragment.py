"""Fragment: the part of the optimizer's states that one rank owns. Made by an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_lite.sharding.placement import Piece, Placement


@dataclass(frozen=True)
class Fragment:
    """A flat range of one local parameter with its states, live 1-dim float32 views.

    Reading them exports the state, writing them (then `Engine.refresh`) imports it.
    """

    placement: Placement
    start: int
    states: Mapping[str, Tensor]

    @property
    def pieces(self) -> list[Piece]:
        """The boxes of logical tensors that the range holds."""
        length = next(iter(self.states.values())).numel()
        return list(self.placement.pieces(self.start, self.start + length))

    def view(self, state: str, piece: Piece) -> Tensor:
        """One state of one of the pieces, in the piece's shape, sharing memory."""
        low = piece.start - self.start
        return self.states[state][low : low + piece.box.numel].view(piece.box.size)
