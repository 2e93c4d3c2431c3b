"""A small valid run, and ways to load it with changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.errors import ConfigError, Problem
from megatron_lite.config.load import LoadedConfig, load_config

Changes = dict[str, dict[str, Any]]


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it; a value of `...` removes the key."""
    result = dict(base)
    for key, value in changes.items():
        if value is ...:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


@pytest.fixture
def load(tmp_path: Path, small_run: dict[str, Any]) -> Callable[..., LoadedConfig]:
    """`load({"model": {...}}, world_size=...)`: the small run with changes."""

    def run(changes: dict[str, Any] | None = None, **options: Any) -> LoadedConfig:
        path = tmp_path / "run.json"
        path.write_text(json.dumps(merged(small_run, changes or {})))
        return load_config(path, **options)

    return run


@pytest.fixture
def problems(load: Callable[..., LoadedConfig]) -> Callable[..., dict[str, Problem]]:
    """The problems of the small run with changes, by JSON path; fails if it is accepted."""

    def run(changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Problem]:
        with pytest.raises(ConfigError) as caught:
            load(changes, **options)
        return {problem.path: problem for problem in caught.value.problems}

    return run
