"""Layers to stages: every layer exactly once, balanced, the remainder where it costs least."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.pipeline.partition import partition_layers


def counts(num_layers: int, num_stages: int) -> list[int]:
    return [len(r) for r in partition_layers(num_layers, num_stages)]


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(1, 16), extra=st.integers(0, 40))
def test_every_layer_once_and_balanced(stages: int, extra: int) -> None:
    num_layers = stages + extra
    ranges = partition_layers(num_layers, stages)
    assert [layer for r in ranges for layer in r] == list(range(num_layers))
    sizes = [len(r) for r in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (8, 1, [8]),
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 2, 3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (7, 4, [2, 2, 2, 1]),
        (3, 2, [2, 1]),
    ],
)
def test_remainder_goes_to_the_stages_before_the_last(
    num_layers: int, num_stages: int, expected: list[int]
) -> None:
    assert counts(num_layers, num_stages) == expected


def test_layout_is_taken_as_it_is() -> None:
    assert partition_layers(7, 3, [1, 4, 2]) == [range(0, 1), range(1, 5), range(5, 7)]


def test_layout_may_leave_the_first_and_last_stage_without_layers() -> None:
    assert partition_layers(4, 4, [0, 2, 2, 0]) == [
        range(0, 0),
        range(0, 2),
        range(2, 4),
        range(4, 4),
    ]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([2, 2], "names 2 stages, but there are 3"),
        ([2, 2, 2], "has 6 layers, but the model has 7"),
        ([4, 0, 3], "stage 1 of the layout .* has 0 layers"),
        ([4, 4, -1], "stage 2 of the layout .* has -1 layers"),
    ],
)
def test_impossible_layouts_are_refused(layout: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        partition_layers(7, 3, layout)


def test_more_stages_than_layers_names_both_numbers() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be balanced over 4 pipeline stages"):
        partition_layers(2, 4)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        partition_layers(num_layers, num_stages)
