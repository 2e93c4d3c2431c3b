"""When a run leaves before a batch job's time is over."""

from __future__ import annotations

import pytest

from megatron_lite.health import time_limit
from megatron_lite.health.time_limit import TimeLimit


@pytest.mark.parametrize(("left", "near"), [(26.0, False), (24.0, True), (-5.0, True)])
def test_twice_a_step_and_a_save_must_fit(
    left: float, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit.time, "time", lambda: 1000.0)
    limit = TimeLimit.of({"SLURM_JOB_END_TIME": f"{1000 + left:.0f}"})
    assert limit.is_near(step=2.0, save=8.0) is near


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_END_TIME": ""}])
def test_a_job_without_a_limit_ends_when_it_likes(env: dict[str, str]) -> None:
    assert not TimeLimit.of(env).is_near(step=1e9, save=1e9)


def test_an_end_that_is_no_time_is_named() -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME=tomorrow: must be seconds"):
        TimeLimit.of({"SLURM_JOB_END_TIME": "tomorrow"})
