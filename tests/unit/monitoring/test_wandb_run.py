"""Weights & Biases, with a stand-in for the few calls of its package that are made."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.config.rules.logging import missing_packages
from megatron_lite.config.schema import LoggingConfig, RunConfig
from megatron_lite.monitoring.scalars import Position, Scalar
from megatron_lite.monitoring.wandb_run import WandbWriter


class Service:
    """What W&B keeps: a run's history by id. As there, a step below the last one is dropped."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, dict[str, float]]] = {}
        self.starts: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **given: Any) -> Any:
        self.starts.append(given)
        steps = self.history.setdefault(given["id"], {})

        def log(values: dict[str, float], *, step: int) -> None:
            assert step >= max(steps, default=0), "W&B would drop this"
            steps.setdefault(step, {}).update(values)

        def finish() -> None:
            self.finished += 1

        return SimpleNamespace(log=log, finish=finish)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=made.init))  # type: ignore[arg-type]
    return made


def log(run_dir: Path, first: int, last: int, *, log_interval: int = 1) -> None:
    """A start of a run with 4 samples a step."""
    start = Position(first - 1, 4 * (first - 1))
    config = {"training": {"seed": 1}}
    writer = WandbWriter(run_dir, project="p", name="n", start=start, config=config)
    for i in range(first, last + 1):
        if i % log_interval == 0:
            writer.write([Scalar("lm loss", first, i), Scalar("lm loss vs samples", 0, 4 * i)])
            writer.write([Scalar("lm loss validation", 2.0, i)])
    writer.close()


def test_a_run_has_its_project_name_config_and_curves(service: Service, tmp_path: Path) -> None:
    log(tmp_path, 1, 2)
    (start,) = service.starts
    assert (start["project"], start["name"], start["group"]) == ("p", "n", "n")
    assert start["config"] == {"training": {"seed": 1}}
    assert start["dir"] == str(tmp_path)
    point = {"lm loss": 1, "lm loss validation": 2.0}
    assert service.history[start["id"]] == {1: point, 2: point}
    assert service.finished == 1


def test_a_run_that_goes_on_continues_its_curve(service: Service, tmp_path: Path) -> None:
    log(tmp_path, 1, 25, log_interval=10)
    log(tmp_path, 26, 40, log_interval=10)
    first, second = service.starts
    assert first["id"] == second["id"] and second["resume"] == "allow"
    assert list(service.history[first["id"]]) == [10, 20, 30, 40]


def test_b52_a_run_that_steps_back_gets_a_curve_of_its_own(
    service: Service, tmp_path: Path
) -> None:
    log(tmp_path, 1, 6)
    log(tmp_path, 4, 8)
    log(tmp_path, 9, 9)
    first, second, third = service.starts
    assert first["id"] != second["id"] == third["id"]
    assert [first["name"], second["name"]] == ["n", "n from 3"]
    assert first["group"] == second["group"], "shown together"
    assert list(service.history[first["id"]]) == [1, 2, 3, 4, 5, 6]
    assert list(service.history[second["id"]]) == [4, 5, 6, 7, 8, 9]


def config(**logging: Any) -> RunConfig:
    return RunConfig.model_construct(logging=LoggingConfig(**logging))


def test_a_missing_package_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where W&B has left its run folder, which Python would import."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    (problem,) = missing_packages(config(wandb_project="mine", wandb_exp_name="first"))
    assert "logging.wandb_project" in str(problem) and "pip install wandb" in str(problem)
    assert not list(missing_packages(config()))
    (tmp_path / "wandb/__init__.py").touch()
    assert not list(missing_packages(config(wandb_project="mine")))
