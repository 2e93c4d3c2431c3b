"""Process groups of a grid, and the object through which DeepSpeed asks for two of them.

Nothing here is global: whoever needs a group is handed it, so two grids can live in one process.
A group of one rank has no process group behind it, and collectives on it do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_lite.mpu.grid import Grid


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, seen from one of them."""

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    """This process's index within `ranks`."""
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class ProcessGroups:
    """Every group of one rank. Made by `create`, a collective call over the grid's world."""

    grid: Grid
    tensor: Group
    data: Group
    pipeline: Group
    model: Group
    """Tensor × pipeline: all ranks of one replica of the model."""
    embedding: Group
    """First and last stage of a pipeline: the holders of a tied embedding's two copies."""
    downstream: Group
    """The pipeline again, for messages to a higher rank. Each direction has a communicator of its
    own, since on NCCL two directions that share one can block each other."""
    upstream: Group
    """The pipeline again, for messages to a lower rank."""

    @classmethod
    def create(cls, grid: Grid, *, timeout: timedelta | None = None) -> ProcessGroups:
        """Make all groups of `grid`, whose ranks are the ranks of the default process group."""

        def along(*axes: str, only: Sequence[int] | None = None) -> Group:
            return _create(grid, axes, timeout=timeout, picks=only)

        return cls(
            grid=grid,
            tensor=along("tp"),
            data=along("dp"),
            pipeline=along("pp"),
            model=along("tp", "pp"),
            embedding=along("pp", only=(0, -1)),
            downstream=along("pp"),
            upstream=along("pp"),
        )

    @property
    def communicators(self) -> dict[str, Group]:
        """The groups over which ranks sum, by name; all ranks have the same names."""
        everyone = Group(tuple(range(self.grid.world_size)), self.grid.rank, dist.group.WORLD)
        summing = ("tensor", "data", "pipeline", "model", "embedding")
        return {"world": everyone} | {name: getattr(self, name) for name in summing}

    @classmethod
    def single(cls) -> ProcessGroups:
        """The groups of a lone process that never initialised torch.distributed."""
        one = Group()
        return cls(Grid(), one, one, one, one, one, one, one)


def _create(
    grid: Grid,
    axes: Sequence[str],
    *,
    timeout: timedelta | None,
    picks: Sequence[int] | None = None,
) -> Group:
    """Make the groups along `axes` on every rank (of each group only the members `picks`)."""
    mine = Group((grid.rank,))
    for members in grid.all_groups(*axes):
        ranks = members if picks is None else sorted({members[i] for i in picks})
        # new_group is collective over the world: every rank calls it for every group.
        handle = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
        if grid.rank in ranks:
            mine = Group(tuple(ranks), ranks.index(grid.rank), handle)
    return mine


class DeepSpeedMpu:
    """The model-parallel unit that `deepspeed.initialize(mpu=…)` asks for its groups.

    It has exactly these seven getters. With `get_tensor_model_parallel_rank` DeepSpeed would count
    a tied embedding's second copy in the gradient norm, and with `initialize_sequence_parallel` it
    would take no model-parallel group at all.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._data = _real(groups.data)
        self._model = _real(groups.model)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Group over which ZeRO partitions and averages."""
        return self._data.handle

    def get_data_parallel_world_size(self) -> int:
        """Number of replicas."""
        return self._data.size

    def get_data_parallel_rank(self) -> int:
        """This rank's replica."""
        return self._data.rank

    def get_data_parallel_group_ranks(self) -> list[int]:
        """World ranks of the data-parallel group."""
        return list(self._data.ranks)

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Group over which norms are summed and overflows agreed."""
        return self._model.handle

    def get_model_parallel_world_size(self) -> int:
        """Ranks of one replica."""
        return self._model.size

    def get_model_parallel_rank(self) -> int:
        """This rank within its replica."""
        return self._model.rank


def _real(group: Group) -> Group:
    """DeepSpeed wants a process group also for one rank; every rank makes its own here."""
    if group.handle is not None:
        return group
    handle, _ = dist.new_subgroups(group_size=1)
    return Group(group.ranks, group.rank, handle)
