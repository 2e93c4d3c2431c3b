"""B41: from any layout to any: loaded directly and resharded, the same bits; training goes on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.checkpoint.reshard import Target, plan, reshard
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import merged, train
from tests.distributed.small import layout, rows
from tests.distributed.test_reload import States, loaded_states, on_disk

Layout = tuple[int, int, int, int, str]
LAYOUTS: list[Layout] = [
    (tp, pp, dp, zero, offload)
    for tp, pp, dp, zero, offload in product(
        (1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 3), ("none", "cpu")
    )
    if tp * pp * dp <= 8 and (zero < 3 or pp == 1)
]
COVERING: set[tuple[str, Layout, Layout]] = {
    ("gpt", (2, 2, 1, 2, "cpu"), (1, 1, 2, 3, "none")),
    ("gpt", (1, 1, 2, 3, "cpu"), (2, 2, 1, 1, "none")),
    ("gpt", (2, 2, 2, 1, "none"), (4, 1, 1, 2, "none")),
    ("llama", (2, 2, 1, 1, "none"), (1, 4, 1, 2, "cpu")),
    ("llama", (4, 1, 1, 2, "none"), (2, 2, 2, 2, "none")),
    ("llama", (1, 4, 1, 1, "cpu"), (2, 1, 2, 3, "cpu")),
    ("llama", (2, 1, 1, 2, "cpu"), (1, 1, 1, 1, "none")),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A few pairs; with --every-pair all 9,248 of them."""
    if "source" not in metafunc.fixturenames:
        return
    cases = sorted(COVERING)
    if metafunc.config.getoption("--every-pair"):
        cases = list(product(("gpt", "llama"), LAYOUTS, LAYOUTS))
    names = ["_to_".join("-".join(map(str, one)) for one in case[1:]) for case in cases]
    ids = [f"{case[0]}-{name}" for case, name in zip(cases, names, strict=True)]
    metafunc.parametrize(("model", "source", "target"), cases, ids=ids)


@pytest.fixture(scope="module")
def saved(
    configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Layout], Path]:
    """The folder of a run of six steps that saved the third, made once."""
    made: dict[tuple[str, Layout], Path] = {}

    def run(model: str, source: Layout) -> Path:
        if (model, source) not in made:
            run_dir = tmp_path_factory.mktemp("source")
            saving = ["training.train_iters=6", "checkpoint.save_interval=3"]
            saving += ['checkpoint.save="checkpoints"']
            go(train, model, configs, source, saving, run_dir)
            made[model, source] = run_dir
        return made[model, source]

    return run


def go(
    work: Callable[..., object],
    model: str,
    configs: dict[str, Path],
    where: Layout,
    overrides: list[str],
    run_dir: Path,
) -> list[object]:
    """Run on all ranks of a layout."""
    tp, pp, dp, zero, offload = where
    flags = [*layout(tp, pp, zero=zero, offload=offload), *overrides]
    return on_ranks(tp * pp * dp, work, configs[model], flags, run_dir)


def test_b41_any_layout_to_any(
    model: str,
    source: Layout,
    target: Layout,
    configs: dict[str, Path],
    saved: Callable[[str, Layout], Path],
    tmp_path: Path,
) -> None:
    run_dir = saved(model, source)
    folder = run_dir / "checkpoints/global_step3"
    expected = on_disk(folder)
    tp, pp, *_ = target
    planned = plan(Manifest.read(folder), Target(tp=tp, pp=pp))
    reshard(folder, tmp_path / "new", planned)
    assert_same(on_disk(tmp_path / "new/global_step3"), expected)
    step = ["training.train_iters=6", "checkpoint.ckpt_step=3"]
    for root in (run_dir / "checkpoints", tmp_path / "new"):
        load = [*step, f'checkpoint.load="{root}"']
        parts = go(loaded_states, model, configs, target, load, tmp_path)
        found = {state: merged([part[state] for part in parts]) for state in STATES}  # type: ignore[index]
        assert_same(found, expected)
    load = [*step, f'checkpoint.load="{tmp_path / "new"}"']
    go(train, model, configs, target, load, tmp_path)
    unbroken = rows(run_dir)[3:]
    for row, before in zip(rows(tmp_path), unbroken, strict=True):
        assert row["lm_loss"] == pytest.approx(before["lm_loss"], rel=1e-4)
        assert row["learning_rate"] == before["learning_rate"]


def assert_same(found: States, expected: States) -> None:
    for state in STATES:
        assert found[state].keys() == expected[state].keys()
        for name, values in expected[state].items():
            np.testing.assert_array_equal(found[state][name], values, f"{state} of {name}")
