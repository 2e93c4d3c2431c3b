"""Grid: rank ↔ (tensor, data, pipeline) coordinates and the rank lists of every group.

Pure integers, no torch: a layout can be looked at on a laptop before any process exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

AXES = ("tp", "dp", "pp")
"""Fastest first, as in Megatron's order tp-cp-ep-dp-pp: a node's GPUs are tensor-parallel peers."""


@dataclass(frozen=True)
class Grid:
    """One rank's view of `tp_size × dp_size × pp_size` ranks.

    >>> Grid(tp_size=2, dp_size=2, pp_size=2, rank=5).coordinates
    {'tp': 1, 'dp': 0, 'pp': 1}
    """

    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    rank: int = 0
    bidirectional: bool = False
    """Two pipelines run against each other: pipeline ranks r and pp_size - 1 - r hold the same
    stages, r of the one and the mirrored one of the other."""
    ends: tuple[int, int] = (0, -1)
    """The pipeline ranks (-1: the last one) that hold the first and the last stage."""

    def __post_init__(self) -> None:
        if min(self.tp_size, self.dp_size, self.pp_size) < 1:
            raise ValueError(f"every axis needs at least one rank: {self}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} lies outside a world of {self.world_size}")
        if self.bidirectional and self.pp_size % 2:
            raise ValueError(f"pipeline ranks in pairs, but {self.pp_size} of them: {self}")

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return self.tp_size * self.dp_size * self.pp_size

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis: what a checkpoint remembers of its layout."""
        return {axis: self.size(axis) for axis in AXES}

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index on each axis."""
        left, found = self.rank, {}
        for axis in AXES:
            left, found[axis] = divmod(left, self.size(axis))
        return found

    @property
    def tp_rank(self) -> int:
        """Index among the ranks that hold shards of the same layers."""
        return self.coordinates["tp"]

    @property
    def dp_rank(self) -> int:
        """Index among the replicas of the same shard."""
        return self.coordinates["dp"]

    @property
    def pp_rank(self) -> int:
        """Index among the ranks that a micro-batch passes through."""
        return self.coordinates["pp"]

    def size(self, axis: str) -> int:
        """Number of ranks along an axis, "tp", "dp" or "pp"."""
        return {"tp": self.tp_size, "dp": self.dp_size, "pp": self.pp_size}[axis]

    def rank_at(self, **coordinates: int) -> int:
        """Rank at the given coordinates; an axis that is left out keeps this rank's own.

        >>> Grid(tp_size=2, dp_size=1, pp_size=4, rank=0).rank_at(pp=3)
        6
        """
        place, stride = self.coordinates | coordinates, 1
        rank = 0
        for axis in AXES:
            rank += place[axis] * stride
            stride *= self.size(axis)
        return rank

    def group(self, *axes: str) -> list[int]:
        """The ranks that differ from this one along the given axes only, ascending.

        >>> Grid(tp_size=2, dp_size=2, pp_size=2, rank=0).group("tp", "pp")
        [0, 1, 4, 5]
        """
        choices = [range(self.size(axis)) for axis in axes]
        return sorted(
            self.rank_at(**dict(zip(axes, place, strict=True))) for place in product(*choices)
        )

    def all_groups(self, *axes: str) -> list[list[int]]:
        """Every group along the given axes, each once, in the same order on every rank."""
        seen = {tuple(self.at(rank).group(*axes)) for rank in range(self.world_size)}
        return [list(group) for group in sorted(seen)]

    @property
    def stage_holder(self) -> int:
        """The first pipeline rank that holds the same stages as this one."""
        mirrored = self.pp_size - 1 - self.pp_rank
        return min(self.pp_rank, mirrored) if self.bidirectional else self.pp_rank

    def gradient_groups(self) -> list[list[int]]:
        """The ranks that hold the same parameters, over which ZeRO partitions: every such group.

        >>> Grid(dp_size=2, pp_size=2, bidirectional=True).gradient_groups()
        [[0, 1, 2, 3]]
        """
        return self._grouped(lambda place: (place.tp_rank, place.stage_holder))

    def model_groups(self) -> list[list[int]]:
        """The ranks that hold each parameter of a model once between them: every such group.

        >>> Grid(pp_size=4, bidirectional=True).model_groups()
        [[0, 1], [2, 3]]
        """
        return self._grouped(lambda place: (place.dp_rank, place.stage_holder != place.pp_rank))

    def _grouped(self, key: Callable[[Grid], tuple[int, ...]]) -> list[list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(key(self.at(rank)), []).append(rank)
        return sorted(groups.values())

    def at(self, rank: int) -> Grid:
        """The same grid seen from another rank."""
        return replace(self, rank=rank)

    def describe(self, ranks: Iterable[int] | None = None) -> str:
        """A line a rank, for logs: `rank 5: tp 1, dp 0, pp 1`."""
        lines = []
        for rank in range(self.world_size) if ranks is None else ranks:
            place = self.at(rank).coordinates
            lines.append(f"rank {rank}: " + ", ".join(f"{a} {place[a]}" for a in AXES))
        return "\n".join(lines)
