"""params-norm, num-zeros and histograms on every layout: those of one process, no element twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lite.trainer import Trainer
from tests.distributed.models import GPT, LLAMA
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import merged, train
from tests.distributed.small import layout, rows, scalars, small_config

LOGGING = {
    "tensorboard_dir": "tensorboard",
    "log_interval": 2,
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "log_histograms_interval": 4,
}
UNTIED = {name: LLAMA[name] for name in LLAMA if name not in GPT} | {"ffn_hidden_size": 96}


@dataclass
class Seen:
    """What a run left in TensorBoard: two log steps, one histogram of each part."""

    norms: list[float]
    zeros: list[float]
    histograms: dict[str, tuple[float, ...]]


def seen(run_dir: Path) -> Seen:
    board = scalars(run_dir / "tensorboard")
    assert [step for step, _ in board["num-zeros"]] == [2, 4]
    assert [step for step, _ in board["params-norm vs samples"]] == [8, 16]
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    histograms = {}
    for tag in reader.Tags()["histograms"]:
        (event,) = reader.Histograms(tag)
        value = event.histogram_value
        assert event.step == 4
        histograms[tag] = (value.num, value.min, value.max, value.sum, value.sum_squares)
    norms, zeros = ([v for _, v in board[tag]] for tag in ("params-norm", "num-zeros"))
    return Seen(norms, zeros, histograms)


def gradients_are_watched(trainer: Trainer) -> None:
    """Let the run fail where the gradients of a step that is not logged are looked at."""
    count = trainer.measures._count

    def checked(gradients: object) -> None:
        assert (trainer.progress.iteration + 1) % 2 == 0
        count(gradients)  # type: ignore[arg-type]

    trainer.measures._count = checked  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def alone(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], tuple[Path, Seen]]:
    """The run of one process, tied or not, which is checked by its weights."""
    known: dict[bool, tuple[Path, Seen]] = {}

    def run(tied: bool) -> tuple[Path, Seen]:
        if tied not in known:
            folder = tmp_path_factory.mktemp("alone")
            config = small_config(
                folder / "run.json",
                corpus,
                # Positions that no sample has, and a vocabulary of which a step sees a part: zeros.
                model={"max_position_embeddings": 24} if tied else UNTIED,
                training={"train_iters": 4},
                logging=LOGGING,
            )
            (result,) = on_ranks(1, train, config, [], folder, gradients_are_watched)
            found = seen(folder)
            weights = merged([result.weights])
            total = sum(float((w.astype("float64") ** 2).sum()) for w in weights.values()) ** 0.5
            assert found.norms[-1] == pytest.approx(total, rel=1e-6)
            assert sum(h[0] for h in found.histograms.values()) == sum(
                w.size for w in weights.values()
            )
            known[tied] = (config, found)
        return known[tied]

    return run


@pytest.mark.parametrize(
    ("tied", "ranks", "overrides"),
    [
        (True, 4, layout(2, 2, zero=1)),
        (True, 2, layout(1, 1, zero=2, offload="cpu")),
        (False, 4, layout(2, 1, zero=3)),
        (False, 2, layout(1, 1, zero=3, offload="cpu")),
        (False, 2, layout(1, 1, zero=2)),
    ],
)
def test_every_layout_measures_what_one_process_does(
    tied: bool,
    ranks: int,
    overrides: list[str],
    alone: Callable[[bool], tuple[Path, Seen]],
    tmp_path: Path,
) -> None:
    config, one = alone(tied)
    on_ranks(ranks, train, config, overrides, tmp_path)
    found = seen(tmp_path)
    assert found.norms == pytest.approx(one.norms, rel=1e-6)
    assert found.zeros == one.zeros
    assert found.zeros[0] >= (8 * 32 if tied else 1), "there must be something to count"
    assert found.histograms.keys() == one.histograms.keys() >= {"weights/layers.1"}
    for tag, facts in found.histograms.items():
        assert facts == pytest.approx(one.histograms[tag], rel=1e-4, abs=1e-3), tag
    assert [row["iteration"] for row in rows(tmp_path)] == [2, 4]
