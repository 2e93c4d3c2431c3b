"""One cluster for all tests here; where Slurm can't run they are skipped, but never in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.models import write_corpus
from tests.distributed.small import small_config
from tests.slurm.cluster import Cluster, cluster, missing
from tests.slurm.jobs import ENDED, LIMIT, STEPS, output, submit


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


@pytest.fixture(scope="session")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps that are saved now and then, and go on from there."""
    checkpoint = {"save": "checkpoints", "load": "checkpoints", "save_interval": 8}
    return small_config(
        tmp_path_factory.mktemp("life") / "run.json",
        corpus,
        training={"train_iters": STEPS},
        checkpoint=checkpoint | {"exit_on_missing_checkpoint": False},
        launch={"requeue": True},
    )


@pytest.fixture(scope="session")
def unbroken(slurm: Cluster, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a job that nothing happens to: two nodes, tensor 2 x data 2."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    job = submit(slurm, config, run_dir)
    assert slurm.wait(job, ENDED, LIMIT) == "COMPLETED", output(run_dir)
    return run_dir
