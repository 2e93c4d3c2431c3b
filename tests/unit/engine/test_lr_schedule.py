"""The learning rate against hand-made values and against Megatron's formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config.sections.optimizer import OptimizerConfig
from megatron_lite.engine.lr_schedule import (
    batch_scaling_factor,
    learning_rate,
    scaled_peak_lr,
)

STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]


def optimizer(**changes: Any) -> OptimizerConfig:
    settings_: dict[str, Any] = {"lr": 1.0, "min_lr": 0.125, "lr_decay_iters": 100}
    if changes.get("lr_decay_style") == "WSD":
        settings_["lr_wsd_decay_iters"] = 20
    return OptimizerConfig(**{**settings_, **changes})


def rate(update: int, total_updates: int = 100, **changes: Any) -> float:
    return learning_rate(optimizer(**changes), update=update, total_updates=total_updates)


def test_warm_up_gives_the_first_update_its_share() -> None:
    rates = [rate(update, lr_warmup_iters=4, lr_decay_style="linear") for update in range(6)]
    assert rates[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert rates[5] < 1.0


def test_b30_after_12_iterations_with_4_skips_the_rate_is_that_of_update_8() -> None:
    """Bad gradients at iterations 1 to 3 and 7; a rate exists before the first update."""
    applied, logged = 0, []
    for iteration in range(1, 13):
        if iteration not in (1, 2, 3, 7):
            applied += 1
        logged.append(rate(applied, lr_warmup_iters=10))
    assert logged[0] == logged[2] == 0.0
    assert logged[6] == logged[5]
    assert logged[-1] == pytest.approx(0.8)


@pytest.mark.parametrize("style", STYLES)
def test_b30_update_0_is_legal(style: str) -> None:
    assert rate(0, lr_decay_style=style, lr_warmup_iters=10) == 0.0
    assert rate(0, lr_decay_style=style) == 1.0


@pytest.mark.parametrize(
    ("style", "update", "expected"),
    [
        ("constant", 100, 1.0),
        ("constant", 1000, 1.0),
        ("linear", 55, 0.125 + 0.875 * 0.5),
        ("cosine", 55, 0.125 + 0.875 * 0.5),
        ("cosine", 40, 0.125 + 0.875 * 0.75),
        ("linear", 100, 0.125),
        ("cosine", 100, 0.125),
        ("linear", 101, 0.125),
        ("inverse-square-root", 40, 0.5),
        ("inverse-square-root", 90, 1 / 3),
        ("inverse-square-root", 101, 0.125),
        ("WSD", 80, 1.0),
        ("WSD", 90, 0.125 + 0.875 * (math.sqrt(2) - 1)),
        ("WSD", 100, 0.125),
        ("WSD", 101, 0.125),
    ],
)
def test_values_after_a_warm_up_of_ten(style: str, update: int, expected: float) -> None:
    assert rate(update, lr_decay_style=style, lr_warmup_iters=10) == pytest.approx(expected)


def test_inverse_square_root_stops_at_min_lr() -> None:
    changes: dict[str, Any] = {"lr_decay_style": "inverse-square-root", "min_lr": 0.5}
    assert rate(90, lr_warmup_iters=10, **changes) == 0.5


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "WSD"])
@settings(max_examples=30, deadline=None)
@given(warm_up=st.integers(0, 60), update=st.integers(1, 149))
def test_the_rate_climbs_to_lr_then_never_rises_nor_leaves_its_bounds(
    style: str, warm_up: int, update: int
) -> None:
    changes: dict[str, Any] = {"lr_decay_style": style, "lr_warmup_iters": warm_up}
    now, following = rate(update, **changes), rate(update + 1, **changes)
    if update < warm_up:
        assert now < following <= 1.0
    else:
        assert 0.125 - 1e-12 <= following <= now <= 1.0
    if warm_up:
        assert rate(warm_up, **changes) == 1.0


def test_decay_takes_the_whole_run_by_default() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.0, lr_decay_style="linear")
    assert learning_rate(config, update=30, total_updates=40) == pytest.approx(0.25)


def test_a_shorter_decay_ends_at_min_lr() -> None:
    assert rate(50, total_updates=400, lr_decay_style="linear") == pytest.approx(0.5625)
    assert rate(300, total_updates=400, lr_decay_style="linear") == 0.125


def test_warm_up_fraction_is_a_share_of_the_decay() -> None:
    by_share = [rate(u, lr_warmup_fraction=0.1) for u in range(101)]
    by_count = [rate(u, lr_warmup_iters=10) for u in range(101)]
    assert by_share == pytest.approx(by_count)


def test_a_fraction_of_an_update_is_kept() -> None:
    """5 % of 50 are 2.5 updates: the second has 2 / 2.5 of lr, the third is in the decay."""
    changes: dict[str, Any] = {"lr_warmup_fraction": 0.05, "lr_decay_iters": 50}
    assert rate(2, lr_decay_style="linear", **changes) == pytest.approx(0.8)
    expected = 0.125 + 0.875 * (1 - 0.5 / 47.5)
    assert rate(3, lr_decay_style="linear", **changes) == pytest.approx(expected)


def test_warm_up_as_long_as_the_decay_divides_nothing_by_zero() -> None:
    assert rate(100, lr_warmup_iters=100) == 1.0
    assert rate(101, lr_warmup_iters=100) == 0.125


def test_negative_update_is_refused() -> None:
    with pytest.raises(ValueError, match="update must be at least 0, got -1"):
        rate(-1)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_batch_scaling(rule: str, factor: float) -> None:
    config = optimizer(lr=0.5, lr_batch_scaling={"rule": rule, "base_global_batch_size": 64})
    assert batch_scaling_factor(config, 256) == factor
    assert batch_scaling_factor(config, 64) == 1.0
    assert scaled_peak_lr(config, 256) == 0.5 * factor


def test_no_batch_scaling_leaves_lr() -> None:
    assert batch_scaling_factor(optimizer(), 256) == 1.0
    assert scaled_peak_lr(optimizer(), 256) == 1.0
