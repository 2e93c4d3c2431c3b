"""A corpus and reference runs, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import schedules
from tests.distributed.models import GPT, LLAMA, write_config, write_corpus
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, train

MODELS = {"llama": LLAMA, "gpt": GPT}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "random")


@pytest.fixture(scope="session")
def configs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _written(MODELS, corpus, tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="session")
def deep_configs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same with layers enough for several stages a rank."""
    return _written(schedules.MODELS, corpus, tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="session")
def one_process(
    configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Result]:
    """The run of one process that every layout is compared with."""
    return _reference(configs, tmp_path_factory)


@pytest.fixture(scope="session")
def deep_reference(
    deep_configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Result]:
    """The same of the deeper models."""
    return _reference(deep_configs, tmp_path_factory)


def _written(models: dict[str, dict[str, Any]], corpus: Path, folder: Path) -> dict[str, Path]:
    return {
        name: write_config(folder / f"{name}.json", corpus, model) for name, model in models.items()
    }


def _reference(
    configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Result]:
    """Runs of one process by name of the config, each made once."""
    found: dict[str, Result] = {}

    def reference(model: str) -> Result:
        if model not in found:
            run_dir = tmp_path_factory.mktemp("reference")
            found[model] = on_ranks(1, train, configs[model], [], run_dir)[0]
        return found[model]

    return reference
