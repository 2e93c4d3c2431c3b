"""Cases of pipeline parallelism: few micro-batches, uneven stages, schedules against each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.distributed.many import Run, train_on
from tests.distributed.plain import assert_close
from tests.distributed.runs import Result, merged
from tests.distributed.small import layout, small_config

COUNTS = (1, 2, 3, 4, 5)
"""Micro-batches of one sample each, on four stages."""


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with a tied table, three steps."""
    folder = tmp_path_factory.mktemp("pipeline")
    return small_config(
        folder / "run.json", corpus, model={"num_layers": 4}, training={"train_iters": 3}
    )


def samples(count: int) -> str:
    return f"training.global_batch_size={count}"


@pytest.fixture(scope="module")
def one_stage(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Result]:
    """The run of one process, by samples of a step."""
    runs = [Run(config, [*layout(), samples(count)]) for count in COUNTS]
    found = train_on(1, runs, tmp_path_factory.mktemp("one"))
    return dict(zip(COUNTS, (results[0] for results in found), strict=True))


def assert_same(results: list[Result], reference: Result) -> None:
    """Losses and norms of every step on every rank, and all gradients of the first."""
    for result in results:
        assert result.losses == pytest.approx(reference.losses, rel=1e-5)
        assert result.norms == pytest.approx(reference.norms, rel=1e-4)
        assert result.norms[0] == pytest.approx(reference.norms[0], rel=1e-5)
    assert_close(merged([r.first_moments for r in results]), merged([reference.first_moments]))


def test_b24_fewer_micro_batches_than_stages(
    config: Path, one_stage: dict[int, Result], tmp_path: Path
) -> None:
    runs = [Run(config, [*layout(1, 4), samples(count)]) for count in COUNTS]
    for count, results in zip(COUNTS, train_on(4, runs, tmp_path), strict=True):
        assert_same(results, one_stage[count])


def test_b24_one_micro_batch_on_two_stages_and_two_replicas(
    config: Path, one_stage: dict[int, Result], tmp_path: Path
) -> None:
    kinds = [layout(1, 2, zero=zero) for zero in (1, 2)]
    for results in train_on(4, [Run(config, [*kind, samples(2)]) for kind in kinds], tmp_path):
        assert_same(results, one_stage[2])


def test_uneven_stages(config: Path, one_stage: dict[int, Result], tmp_path: Path) -> None:
    layouts = ([1, 2, 1], [2, 1, 1], [1, 1, 2])
    key = "parallel.pipeline_model_parallel_layout"
    runs = [Run(config, [*layout(1, 3), samples(5), f"{key}={counts}"]) for counts in layouts]
    for counts, results in zip(layouts, train_on(3, runs, tmp_path), strict=True):
        held = [{int(n.split(".")[1]) for n in r.weights if "layers" in n} for r in results]
        assert [len(layers) for layers in held] == counts
        assert_same(results, one_stage[5])


def test_both_schedules_give_the_same_bits(config: Path, tmp_path: Path) -> None:
    kinds = [[*layout(1, 4), samples(5)], [*layout(2, 2), samples(3)], [*layout(1, 2), samples(4)]]
    runs = [
        Run(config, [*kind, f'parallel.pipeline_schedule="{name}"'])
        for kind in kinds
        for name in ("gpipe", "1f1b")
    ]
    found = train_on(4, runs, tmp_path)
    for gpipe, alternating in zip(found[::2], found[1::2], strict=True):
        for one, other in zip(gpipe, alternating, strict=True):
            assert (one.losses, one.norms) == (other.losses, other.norms)
            assert one.weights.keys() == other.weights.keys()
            for name, values in one.weights.items():
                np.testing.assert_array_equal(other.weights[name], values, err_msg=name)


def test_the_tied_table_is_one_table(config: Path, tmp_path: Path) -> None:
    """Both stages' copies keep equal bits; `merged` compares them."""
    name = "embedding.word_embeddings.weight"
    (results,) = train_on(4, [Run(config, [*layout(1, 4), samples(4)])], tmp_path)
    assert [name in result.weights for result in results] == [True, False, False, True]
    table = merged([result.weights for result in results])[name]
    assert np.abs(table).max() < 1
    np.testing.assert_array_equal(results[0].weights[name], results[3].weights[name])
