"""The texts of `data.split` (case B11) and the forms of corpus paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.blend import parse_blend
from megatron_lite.config.split import parse_split


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("100,0,0", (1, 0, 0)),
        ("100", (1, 0, 0)),
        ("9,1", (0.9, 0.1, 0)),
        (".5,.25,2.5e-1", (0.5, 0.25, 0.25)),
    ],
)
def test_b11_accepted_splits(text: str, parts: tuple[float, float, float]) -> None:
    assert parse_split(text) == pytest.approx(parts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-1,1,0", 'field 1, "-1", is negative'),
        ("90,abc5,5", 'field 2, "abc5", is no number'),
        ("0,0,0", "must have a part above 0"),
        ("nan,1,1", "not finite"),
        ("1,inf,1", "not finite"),
        ("1,1,1,1", "4 fields"),
        ("", "is no number"),
        ("1,,1", 'field 2, "", is no number'),
        ("1_0,1,1", "is no number"),
        ("1e308,1e308,1e308", "not finite"),
    ],
)
def test_b11_refused_splits(problems, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_split(text)
    assert words in problems({"data": {"split": text}})["data.split"].rule


def test_b11_numbers_are_no_split(problems) -> None:
    assert "written as text" in problems({"data": {"split": [969, 30, 1]}})["data.split"].rule


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=3, max_size=3))
def test_b11_parts_sum_to_one(sizes: list[float]) -> None:
    if sum(sizes) > 0:
        parts = parse_split(",".join(map(repr, sizes)))
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0


@pytest.mark.parametrize(
    ("path", "blend"),
    [
        ("a", ((1.0, "a"),)),
        (["a"], ((1.0, "a"),)),
        ([0.7, "a", 3, "b"], ((0.7, "a"), (3.0, "b"))),
        ([0, "a", 1, "b"], ((0.0, "a"), (1.0, "b"))),
    ],
)
def test_accepted_blends(path, blend) -> None:
    assert parse_blend(path) == blend


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ([], "must be a prefix"),
        (3, "must be a prefix"),
        ("", "stands where a prefix belongs"),
        (["0.7", "a", "0.3", "b"], "'0.7' stands where a weight belongs"),
        ([1, "a", 2], "3 entries do not form pairs"),
        ([-1, "a", 2, "b"], "weight -1"),
        ([float("nan"), "a"], "weight nan"),
        ([0, "a"], "a weight above 0"),
        (["a", "b"], "'a' stands where a weight belongs"),
        ([True, "a"], "True stands where a weight belongs"),
    ],
)
def test_refused_blends(problems, path, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_blend(path)
    assert words in problems({"data": {"data_path": path}})["data.data_path"].rule
