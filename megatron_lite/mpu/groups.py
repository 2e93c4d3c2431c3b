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
    gradient: Group
    """Holders of the same parameters, over which ZeRO partitions and averages: the data group, and
    with two pipelines against each other the mirrored rank's too."""
    model: Group
    """Holders of each parameter once between them: tensor × pipeline, or half of the pipeline."""
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

        def along(*axes: str) -> Group:
            return _create(grid, grid.all_groups(*axes), timeout)

        ends = [ranks for pipeline in grid.all_groups("pp") for ranks in _ends(grid, pipeline)]
        data = along("dp")
        return cls(
            grid=grid,
            tensor=along("tp"),
            data=data,
            pipeline=along("pp"),
            gradient=_create(grid, grid.gradient_groups(), timeout) if grid.bidirectional else data,
            model=_create(grid, grid.model_groups(), timeout),
            embedding=_create(grid, ends, timeout),
            downstream=along("pp"),
            upstream=along("pp"),
        )

    @property
    def communicators(self) -> dict[str, Group]:
        """The groups over which ranks sum, by name; all ranks have the same names."""
        everyone = Group(tuple(range(self.grid.world_size)), self.grid.rank, dist.group.WORLD)
        summing = ["tensor", "data", "pipeline", "model", "embedding"]
        if self.grid.bidirectional:  # otherwise the same ranks as data
            summing.append("gradient")
        return {"world": everyone} | {name: getattr(self, name) for name in summing}

    @classmethod
    def single(cls) -> ProcessGroups:
        """The groups of a lone process that never initialised torch.distributed."""
        one = Group()
        return cls(Grid(), one, one, one, one, one, one, one, one)


def _ends(grid: Grid, pipeline: Sequence[int]) -> list[list[int]]:
    """The ranks of a pipeline that hold its first and its last stage, for each direction once."""
    ends = [sorted({pipeline[i] for i in grid.ends})]
    if grid.bidirectional:
        last = len(pipeline) - 1
        mirrored = sorted({pipeline[last - i % len(pipeline)] for i in grid.ends})
        ends += [mirrored] if mirrored != ends[0] else []
    return ends


def _create(grid: Grid, lists: Sequence[Sequence[int]], timeout: timedelta | None) -> Group:
    """Make the group of each list of ranks, the same lists on every rank; returns this rank's."""
    mine = Group((grid.rank,))
    for members in lists:
        ranks = list(members)
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
        self._data = _real(groups.gradient)
        self._model = _real(groups.model)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Group over which ZeRO partitions and averages."""
        return self._data.handle

    def get_data_parallel_world_size(self) -> int:
        """Number of holders of the same parameters."""
        return self._data.size

    def get_data_parallel_rank(self) -> int:
        """This rank among them."""
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
