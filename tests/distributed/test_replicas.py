"""Copies of weights that drift apart end the run, by name of tensor and rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.small import layout, small_config
from tests.distributed.wrong_numbers import Case, run_cases

EVERY_2 = "training.check_replicas_interval=2"


@dataclass(frozen=True)
class Nudge:
    """One element of a parameter of one rank is off by one bit after iteration 3."""

    path: str
    rank: int
    element: int = -1

    def __call__(self, trainer: Trainer) -> None:
        if dist.get_rank() != self.rank:
            return
        check, (stage,) = trainer.check_replicas, trainer.engine.modules().values()

        def nudged() -> None:
            if trainer.progress.iteration == 4:
                for working in trainer.engine.working():
                    if working.parameter is stage.get_parameter(self.path):
                        working.values.view(-1).view(torch.int32)[self.element] += 1
            check()

        trainer.check_replicas = nudged  # type: ignore[method-assign]


def unharmed(trainer: Trainer) -> None:
    """Nothing drifts."""


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps in fp32."""
    folder = tmp_path_factory.mktemp("replicas")
    return small_config(folder / "run.json", corpus, training={"train_iters": 5})


def test_a_drifted_copy_is_named(config: Path, tmp_path: Path) -> None:
    cases = [
        Case([*layout(2, 1), EVERY_2], Nudge("layers.1.input_norm.weight", 3)),
        Case([*layout(2, 1), EVERY_2], Nudge("layers.0.mlp.down.weight", 2)),
        Case([*layout(1, 2, zero=2), EVERY_2], Nudge("head.table.weight", 2, 5)),
        Case([*layout(2, 1, zero=3), EVERY_2], Nudge("final_norm.bias", 1)),
        Case([*layout(2, 2), EVERY_2], unharmed),
        Case([*layout(1, 2), EVERY_2, 'parallel.pipeline_schedule="chimera"'], unharmed),
    ]
    everyones = on_ranks(4, run_cases, config, cases, tmp_path, watchdog=120)
    assert all(errors == everyones[0] for errors in everyones)
    norm, sharded, table, part, *nothing = everyones[0]
    assert norm.startswith("iteration 4: replicas drifted")
    assert "layers.1.input_norm.weight: rank 3 on n3 holds" in norm
    assert "another value than rank 0, 1, 2. At iteration 2 they were equal" in norm
    assert "layers.0.mlp.down.weight: ranks 0 on n0, 2 on n2 hold" in sharded
    assert "hold different values, none of them a majority" in sharded
    assert "embedding.word_embeddings.weight: rank 2 on " in table
    assert "than rank 0, 1, 3" in table, "on both stages, for the head is tied"
    assert "final_norm.bias: ranks 0 on " in part and ", 1 on " in part
    assert nothing == ["", ""]
