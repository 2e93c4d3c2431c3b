"""Sources of a blend in a real run: what is logged and saved of them, and weights that change."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.report import Reporter
from tests.distributed.models import write_corpus
from tests.distributed.processes import ROOT
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import make_trainer
from tests.distributed.small import rows, small_config


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("blend")
    return [str(write_corpus(folder / name, seed=seed)) for seed, name in enumerate(("x", "y"))]


def blend(prefixes: list[str], *weights: float) -> str:
    """The override for a blend of the sources."""
    pairs = ", ".join(f'{w}, "{prefix}"' for w, prefix in zip(weights, prefixes, strict=True))
    return f"data.data_path=[{pairs}]"


def what_is_read(
    config: Path, overrides: list[str], run_dir: Path
) -> tuple[list[np.ndarray], list[str]]:
    """The inputs of this rank's micro-batches [1, s], in order, and what the run says."""
    said: list[str] = []
    Reporter.say = lambda self, line: said.append(line)  # type: ignore[method-assign]
    trainer = make_trainer(config, overrides, run_dir)
    trainer.report._echo = said.append
    seen: list[np.ndarray] = []

    def listening(batches: Iterator[Any]) -> Iterator[Any]:
        for micro in batches:
            seen.append(micro.tokens.numpy().copy())
            yield micro

    trainer.train_batches = listening(trainer.train_batches)
    trainer.fit()
    trainer.report.close()
    trainer.engine.close()
    return seen, said


def test_weights_may_change_and_ranges_be_left_out(prefixes: list[str], tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run.json", Path(prefixes[0]), data={"split": "1,0,0"}, training={"seed": 3}
    )
    saving = ['checkpoint.save="checkpoints"', "training.train_iters=3"]
    one, _ = on_ranks(2, what_is_read, config, [blend(prefixes, 3, 1), *saving], tmp_path)
    assert " samples of each source at iteration 2 |" in "\n".join(one[1])
    x, y = prefixes
    assert [row["source_samples"] for row in rows(tmp_path)] == [
        {x: 3 * step, y: step} for step in (1, 2, 3)
    ]
    progress = Manifest.read(tmp_path / "checkpoints/global_step3").progress
    assert progress["source_samples"] == {x: 9, y: 3} and progress["data_start"] == 0
    again = [blend(prefixes, 1, 1), 'checkpoint.load="checkpoints"', "training.train_iters=6"]
    again += ['checkpoint.changed_data="continue"', "data.skip_samples=[[14, 18]]"]
    parts = on_ranks(2, what_is_read, config, again, tmp_path)
    assert any(f"goes on behind so many samples | {x}: 9 | {y}: 3" in s for s in parts[0][1])
    assert rows(tmp_path)[-1]["source_samples"] == {x: 17, y: 11}
    datasets = [GPTDataset(IndexedDataset(p), seq_length=16, seed=3) for p in prefixes]
    # From 12 on by turns; 14 to 17, the second and third of each, are left out.
    numbers = [(s, first + k) for k in (0, 3, 4, 5, 6, 7) for s, first in ((1, 3), (0, 9))]
    expected = [datasets[source][number][:-1] for source, number in numbers]
    for rank, (seen, _) in enumerate(parts):
        mine = expected[rank::2]
        np.testing.assert_array_equal(np.concatenate(seen), np.stack(mine))
    told = named_by_the_tool(config, again, tmp_path / "checkpoints", 5)
    for rank, (seen, _) in enumerate(parts):
        np.testing.assert_array_equal(told[2 * rank : 2 * rank + 2], np.concatenate(seen[2:4]))


def named_by_the_tool(
    config: Path, overrides: list[str], checkpoints: Path, iteration: int
) -> np.ndarray:
    """The inputs that `inspect_data.py --which-documents` names, by replica [samples, s]."""
    command = [sys.executable, "tools/inspect_data.py", "--which-documents", str(config)]
    command += ["--iteration", str(iteration), "--load", str(checkpoints)]
    for override in [*overrides, "launch.gpus_per_node=2"]:
        command += ["--set", override]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "goes on behind so many samples" in done.stdout
    assert "iteration 5: samples 20 to 23 of the run\n" in done.stdout
    assert '"skip_samples": [[20, 24]]' in done.stdout
    found: list[list[int]] = []
    for line in done.stdout.splitlines():
        if sample := re.fullmatch(r"  sample \d+: number \d+ of (.+)", line):
            dataset = IndexedDataset(sample[1])
            found.append([])
        elif run := re.fullmatch(r"    document (\d+), tokens (\d+) to (\d+)", line):
            document, first, last = map(int, run.groups())
            found[-1] += dataset[document][first : last + 1].tolist()
    return np.array(found)[:, :-1]
