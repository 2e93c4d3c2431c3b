"""Options and markers for the whole suite, and a run that several folders look at."""

from pathlib import Path

import pytest
import torch

from tests.resumed import resumed_run

torch.set_num_threads(1)  # tests of several ranks share the cores


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went on from before its last log step."""
    return resumed_run(tmp_path_factory.mktemp("resumed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-pair", action="store_true", help="load from every layout into every other: a night"
    )
    parser.addoption(
        "--pairs-per-target",
        type=int,
        metavar="N",
        help="load N random layouts into each; the seed is the date",
    )
    parser.addoption(
        "--every", action="store_true", help="run the whole matrix of layouts, not a covering part"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every, gpu = config.getoption("--every"), torch.cuda.is_available()
    for item in items:
        if "every" in item.keywords and not every:
            item.add_marker(pytest.mark.skip(reason="part of the whole matrix: run with --every"))
        if "gpu" in item.keywords and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
