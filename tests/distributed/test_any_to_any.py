"""B41: from any layout to any: loaded directly and resharded, the same bits; training goes on.

A world of ranks is started once for a target and then visits all sources that it is to load.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

from megatron_lite.build_model import build_grid
from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.checkpoint.reshard import Target, plan, reshard
from megatron_lite.config.load import load_config
from megatron_lite.mpu.groups import ProcessGroups
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import logical_state, make_trainer, merged, train
from tests.distributed.small import layout, rows
from tests.distributed.test_reload import States, on_disk


class Layout(NamedTuple):
    """One way to spread a model and its optimizer."""

    tp: int
    pp: int
    dp: int
    zero: int
    offload: str

    @property
    def overrides(self) -> list[str]:
        """What asks for it."""
        return layout(self.tp, self.pp, zero=self.zero, offload=self.offload)

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.tp * self.pp * self.dp


LAYOUTS = [
    where
    for where in map(
        Layout._make, product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 3), ("none", "cpu"))
    )
    if where.ranks <= 8 and (where.zero < 3 or where.pp == 1)
]
COVERING = [
    ("gpt", Layout(2, 2, 1, 2, "cpu"), Layout(1, 1, 2, 3, "none")),
    ("gpt", Layout(1, 1, 2, 3, "cpu"), Layout(2, 2, 1, 1, "none")),
    ("gpt", Layout(2, 2, 2, 1, "none"), Layout(4, 1, 1, 2, "none")),
    ("llama", Layout(2, 2, 1, 1, "none"), Layout(1, 4, 1, 2, "cpu")),
    ("llama", Layout(4, 1, 1, 2, "none"), Layout(2, 2, 2, 2, "none")),
    ("llama", Layout(1, 4, 1, 1, "cpu"), Layout(2, 1, 2, 3, "cpu")),
    ("llama", Layout(2, 1, 1, 2, "cpu"), Layout(1, 1, 1, 1, "none")),
]
SECONDS_PER_PAIR = 30.0
Sources = dict[tuple[str, Layout], list[Layout]]


def pairs(config: pytest.Config) -> Sources:
    """The sources of each (model, target): a few, a random sample, or all 9,248 pairs."""
    targets = list(product(("gpt", "llama"), LAYOUTS))
    if config.getoption("--every-pair"):
        return dict.fromkeys(targets, LAYOUTS)
    if count := config.getoption("--pairs-per-target"):
        draw = random.Random(date.today().isoformat())
        return {target: draw.sample(LAYOUTS, min(count, len(LAYOUTS))) for target in targets}
    covering: Sources = defaultdict(list)
    for model, source, target in COVERING:
        covering[model, target].append(source)
    return covering


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each target."""
    if "sources" in metafunc.fixturenames:
        cases = [(*target, sources) for target, sources in pairs(metafunc.config).items()]
        ids = [f"{model}-to-{'-'.join(map(str, target))}" for model, target, _ in cases]
        metafunc.parametrize(("model", "target", "sources"), cases, ids=ids)


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
            saving += ['checkpoint.save="checkpoints"', *source.overrides]
            on_ranks(source.ranks, train, configs[model], saving, run_dir)
            made[model, source] = run_dir
        return made[model, source]

    return run


class Visit(NamedTuple):
    """A source as a world of the target finds it."""

    saved: Path
    resharded: Path
    run_dir: Path


class Seen(NamedTuple):
    """What a rank of that world held after loading."""

    saved: States
    resharded: States


def visit_all(config: Path, overrides: Sequence[str], visits: Sequence[Visit]) -> list[Seen]:
    """Load each source directly, then its resharded form, and train on from that."""
    loaded = load_config(config, overrides, dist.get_world_size())
    grid = build_grid(loaded.config, rank=dist.get_rank(), world_size=dist.get_world_size())
    groups = ProcessGroups.create(grid)

    def load(root: Path, run_dir: Path, *, go_on: bool) -> States:
        flags = [*overrides, f'checkpoint.load="{root}"', "checkpoint.ckpt_step=3"]
        trainer = make_trainer(config, flags, run_dir, groups)
        states = {state: logical_state(trainer.engine, state) for state in STATES}
        if go_on:
            trainer.fit()
        trainer.train_batches = iter(())  # ends the loader's workers
        trainer.report.close()
        trainer.engine.close()
        return states

    return [
        Seen(
            load(visit.saved, visit.run_dir / "saved", go_on=False),
            load(visit.resharded, visit.run_dir / "resharded", go_on=True),
        )
        for visit in visits
    ]


def test_b41_any_layout_to_any(
    model: str,
    target: Layout,
    sources: list[Layout],
    configs: dict[str, Path],
    saved: Callable[[str, Layout], Path],
    tmp_path: Path,
) -> None:
    visits = []
    for number, source in enumerate(sources):
        root, new = saved(model, source) / "checkpoints", tmp_path / f"new{number}"
        manifest = Manifest.read(root / "global_step3")
        reshard(root / "global_step3", new, plan(manifest, Target(tp=target.tp, pp=target.pp)))
        visits.append(Visit(root, new, tmp_path / f"run{number}"))
        for form in Seen._fields:
            (visits[-1].run_dir / form).mkdir(parents=True)
    step = ["training.train_iters=6", *target.overrides]
    watchdog = SECONDS_PER_PAIR * (1 + len(visits))
    ranks = on_ranks(target.ranks, visit_all, configs[model], step, visits, watchdog=watchdog)
    for number, (source, visit) in enumerate(zip(sources, visits, strict=True)):
        what = f"{model}: {source} to {target}"
        expected = on_disk(visit.saved / "global_step3")
        assert_same(on_disk(visit.resharded / "global_step3"), expected, what)
        for form in Seen._fields:
            parts = [getattr(rank[number], form) for rank in ranks]
            found = {state: merged([part[state] for part in parts]) for state in STATES}
            assert_same(found, expected, f"{what}, {form}")
        assert_goes_on(rows(visit.run_dir / "resharded"), rows(visit.saved.parent)[3:], what)


def assert_same(found: States, expected: States, what: str) -> None:
    for state in STATES:
        assert found[state].keys() == expected[state].keys(), what
        for name, values in expected[state].items():
            np.testing.assert_array_equal(found[state][name], values, f"{what}: {state} of {name}")


def assert_goes_on(
    found: list[dict[str, float]], unbroken: list[dict[str, float]], what: str
) -> None:
    assert len(found) == len(unbroken) == 3, what
    for row, before in zip(found, unbroken, strict=True):
        assert row["lm_loss"] == pytest.approx(before["lm_loss"], rel=1e-4), what
        assert row["learning_rate"] == before["learning_rate"], what
