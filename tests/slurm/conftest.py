"""One cluster for all tests here; where Slurm can't run they are skipped, but never in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.models import write_corpus
from tests.slurm.cluster import Cluster, cluster, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes."""
    lack = [f"{name} is not installed" for name in missing()]
    if os.geteuid() != 0:
        lack.append("the daemons need root")
    if lack and os.environ.get("CI") == "true":
        pytest.fail(f"Slurm can't run: {'; '.join(lack)}")
    if lack:
        pytest.skip(f"Slurm can't run: {'; '.join(lack)}; apt-get install slurm-wlm munge")
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random tokens."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "random")
