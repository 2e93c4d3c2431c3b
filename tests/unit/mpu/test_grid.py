"""The grid: ranks and coordinates are one to one, groups partition the world, tensor is fastest."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.mpu.grid import AXES, Grid

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
AXIS_SETS = [axes for n in (1, 2, 3) for axes in combinations(AXES, n)]


@settings(deadline=None)
@given(SIZES)
def test_coordinates_and_ranks_are_one_to_one(sizes: tuple[int, int, int]) -> None:
    grid = Grid(*sizes)
    places = {tuple(grid.at(r).coordinates.values()) for r in range(grid.world_size)}
    assert len(places) == grid.world_size == sizes[0] * sizes[1] * sizes[2]
    for rank in range(grid.world_size):
        here = grid.at(rank)
        assert grid.rank_at(**here.coordinates) == rank == here.rank
        place = (here.tp_rank, here.dp_rank, here.pp_rank)
        assert all(0 <= i < n for i, n in zip(place, sizes, strict=True))


@settings(deadline=None)
@given(SIZES)
def test_order_is_tensor_then_data_then_pipeline(sizes: tuple[int, int, int]) -> None:
    tp, dp, _ = sizes
    grid = Grid(*sizes)
    for rank in range(grid.world_size):
        place = grid.at(rank).coordinates
        assert rank == place["tp"] + tp * (place["dp"] + dp * place["pp"])


@settings(deadline=None, max_examples=40)
@given(SIZES, st.sampled_from(AXIS_SETS))
def test_groups_partition_the_world(sizes: tuple[int, int, int], axes: tuple[str, ...]) -> None:
    grid = Grid(*sizes)
    groups = grid.all_groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        assert grid.at(group[-1]).all_groups(*axes) == groups
        for rank in group:
            here = grid.at(rank)
            assert here.group(*axes) == group
            away = [a for a in AXES if a not in axes]
            there = grid.at(group[0]).coordinates
            assert all(here.coordinates[a] == there[a] for a in away)


def test_the_groups_of_two_by_two_by_two() -> None:
    grid = Grid(tp_size=2, dp_size=2, pp_size=2, rank=5)
    assert grid.coordinates == {"tp": 1, "dp": 0, "pp": 1}
    assert grid.all_groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.all_groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.all_groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.group("tp", "pp") == [0, 1, 4, 5]


def test_rank_at_keeps_axes_that_are_left_out() -> None:
    grid = Grid(tp_size=2, dp_size=3, pp_size=2, rank=9)
    assert grid.coordinates == {"tp": 1, "dp": 1, "pp": 1}
    assert grid.rank_at(pp=0) == 3
    assert grid.rank_at(tp=0, dp=2) == 10


@pytest.mark.parametrize("arguments", [(0, 1, 1, 0), (1, 0, 1, 0), (2, 2, 1, 4), (2, 1, 1, -1)])
def test_impossible_grids_are_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError):
        Grid(*arguments)


def test_describe_has_a_line_a_rank() -> None:
    assert Grid(tp_size=2).describe() == "rank 0: tp 0, dp 0, pp 0\nrank 1: tp 1, dp 0, pp 0"
    assert Grid(tp_size=2).describe([1]) == "rank 1: tp 1, dp 0, pp 0"


@settings(deadline=None)
@given(SIZES)
def test_holders_of_a_parameter_and_of_a_model_are_the_axes(sizes: tuple[int, int, int]) -> None:
    grid = Grid(*sizes)
    assert grid.gradient_groups() == grid.all_groups("dp")
    assert grid.model_groups() == grid.all_groups("tp", "pp")


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 6]))
def test_two_pipelines_against_each_other(tp: int, dp: int, pp: int) -> None:
    """A gradient group and a model group share one rank, as DeepSpeed's two groups must; the first
    are the holders of the same two stages, in the second every stage is held once."""
    grid = Grid(tp, dp, pp, bidirectional=True)
    held = {r: {grid.at(r).pp_rank, pp - 1 - grid.at(r).pp_rank} for r in range(grid.world_size)}
    gradient, model = grid.gradient_groups(), grid.model_groups()
    assert {len(group) for group in gradient} == {2 * dp}
    assert len(gradient[0]) * len(model[0]) == grid.world_size
    for ranks in gradient:
        assert len({(grid.at(r).tp_rank, frozenset(held[r])) for r in ranks}) == 1
        assert all(len(set(ranks) & set(group)) == 1 for group in model)
    for ranks in model:
        places = sorted((grid.at(r).tp_rank, stage) for r in ranks for stage in held[r])
        assert places == [(t, stage) for t in range(tp) for stage in range(pp)]
        assert len({grid.at(r).dp_rank for r in ranks}) == 1


def test_an_odd_pipeline_has_no_pairs() -> None:
    with pytest.raises(ValueError, match="pairs"):
        Grid(pp_size=3, bidirectional=True)
