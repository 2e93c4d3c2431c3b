"""Evaluation counts every sample once, on any layout, and training does not notice it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.data.loader import MicroBatch
from megatron_lite.mpu.groups import Group
from megatron_lite.trainer import Trainer
from tests.distributed.models import VOCAB
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, make_trainer, train
from tests.distributed.small import layout, rows, small_config

DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
EVERY_STEP = ["training.eval_interval=1", "training.eval_micro_batch_size=4"]
EVERY_STEP += ["training.eval_iters=null"]


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps in micro-batches of two."""
    return small_config(
        tmp_path_factory.mktemp("evaluation") / "run.json",
        corpus,
        training={"train_iters": 4, "micro_batch_size": 2},
    )


def write_samples(prefix: Path, number: int, *, seq_length: int = 16) -> Path:
    """A corpus of one document that is `number` samples long."""
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    rng = np.random.default_rng(number)
    builder.add_document(rng.integers(0, VOCAB, number * seq_length + 1))
    builder.finalize()
    return prefix


def random_batch(rows: int, length: int) -> MicroBatch:
    """The same numbers on every rank."""
    drawn = torch.from_numpy(np.random.default_rng(rows).integers(0, VOCAB, (rows, length + 1)))
    return MicroBatch(drawn[:, :-1], drawn[:, 1:], torch.ones(rows, length))


def train_with_evaluations(
    config: Path, overrides: list[str], run_dir: Path
) -> tuple[Result, list[float], bytes]:
    """Evaluate, train with evaluations, then evaluate two other shapes."""
    found: list[float] = []
    kept: list[Trainer] = []

    def before(trainer: Trainer) -> None:
        kept.append(trainer)
        if "valid" in trainer.evaluations:
            found.append(trainer.evaluate("valid"))

    result = train(config, overrides, run_dir, before)
    state = torch.get_rng_state().numpy().tobytes()
    return result, found, state


def evaluate_shapes(config: Path, overrides: list[str], run_dir: Path) -> list[float]:
    """Losses of batches of other sizes and a shorter sequence, one after the other."""
    trainer = make_trainer(config, overrides, run_dir)
    losses = []
    for shape in (4, 16), (2, 16), (1, 16), (3, 8), (4, 16):
        # Every replica would get a batch of its own; the same one for all has the same mean.
        trainer.evaluations = {"valid": lambda shape=shape: iter([random_batch(*shape)] * 3)}
        losses.append(trainer.evaluate("valid"))
    trainer.report.close()
    trainer.engine.close()
    return losses


def refused_shapes(config: Path, overrides: list[str], run_dir: Path) -> list[str]:
    """What is said of batches that can't be run; then training has to go on."""
    trainer = make_trainer(config, overrides, run_dir)
    said = []
    for shapes in ([(4, 16), (3, 16)], [(2, 17)], [(1, 15)]):
        batches = [random_batch(*shape) for shape in shapes]
        trainer.evaluations = {"valid": lambda batches=batches: iter(batches)}
        try:
            trainer.evaluate("valid")
            said.append("")
        except ValueError as error:
            said.append(str(error))
    trainer.engine.train(True)
    trainer.fit()
    return said


def losses_of(run_dir: Path, part: str = "valid") -> list[float]:
    return [row["lm_loss"] for row in rows(run_dir, part)]


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        pytest.param(2, layout(1, 2), id="pp2"),
        pytest.param(2, layout(1, 1, zero=3), id="dp2-zero3"),
    ],
)
def test_b27_training_does_not_notice_evaluation(
    world_size: int, sizes: list[str], config: Path, tmp_path: Path
) -> None:
    """Losses, norms, weights and random state with evaluations before and between the steps."""
    folders = [tmp_path / name for name in ("with", "without", "one")]
    for folder in folders:
        folder.mkdir()
    overrides = [*sizes, *DROPOUT]
    with_ = on_ranks(
        world_size, train_with_evaluations, config, [*overrides, *EVERY_STEP], folders[0]
    )
    without = on_ranks(world_size, train_with_evaluations, config, overrides, folders[1])
    for (one, _, one_state), (other, _, other_state) in zip(with_, without, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        for name, values in other.weights.items():
            np.testing.assert_array_equal(one.weights[name], values, err_msg=name)
        assert one_state == other_state
    assert [row["consumed_samples"] for row in rows(folders[0])] == [4, 8, 12, 16]

    ((_, first, _),) = on_ranks(1, train_with_evaluations, config, EVERY_STEP, folders[2])
    for _, found, _ in with_:
        assert found == pytest.approx(first, rel=1e-5), "before training, where weights are equal"
    assert len(losses_of(folders[0])) == 5
    assert len(set(losses_of(folders[0]))) == 5, "before training and after each of four steps"


def test_b27_evaluation_equals_one_stage_at_every_step(config: Path, tmp_path: Path) -> None:
    for pp in (1, 2):
        (tmp_path / str(pp)).mkdir()
        on_ranks(pp, train, config, [*layout(1, pp), *EVERY_STEP], tmp_path / str(pp))
    assert losses_of(tmp_path / "2") == pytest.approx(losses_of(tmp_path / "1"), rel=1e-5)


def test_b27_other_shapes(config: Path, tmp_path: Path) -> None:
    """A larger and a smaller batch, a shorter sequence, and the first one again."""
    overrides = ["training.eval_interval=1"]
    (expected,) = on_ranks(1, evaluate_shapes, config, overrides, tmp_path)
    assert len(set(expected[:4])) == 4 and expected[4] == expected[0]
    for pp, world_size in ((2, 2), (2, 4)):
        sizes = [*layout(1, pp), *overrides]
        for found in on_ranks(world_size, evaluate_shapes, config, sizes, tmp_path):
            assert found == pytest.approx(expected, rel=1e-5)


def test_b27_impossible_shapes_are_refused_before_anything_is_sent(
    config: Path, tmp_path: Path
) -> None:
    overrides = [*layout(2, 2), "parallel.sequence_parallel=true", "training.train_iters=1"]
    for said in on_ranks(4, refused_shapes, config, overrides, tmp_path):
        assert "(3, 16)" in said[0] and "(4, 16)" in said[0]
        assert "17 tokens" in said[1] and "model.max_position_embeddings is 16" in said[1]
        assert "1 x 15 tokens" in said[2] and "sequence_parallel" in said[2]


@pytest.mark.parametrize(("samples", "dp"), [(5, 2), (3, 4)])
def test_b28_ranks_that_run_out_of_samples(
    samples: int, dp: int, corpus: Path, tmp_path: Path
) -> None:
    """A full pass over a part that does not divide: no hang, and each sample counts once."""
    own = write_samples(tmp_path / "valid", samples)
    data = {"train_data_path": str(corpus), "valid_data_path": str(own)}
    whole = {"eval_interval": 1, "eval_iters": None, "train_iters": 2}
    config = small_config(tmp_path / "run.json", corpus, data=data, training=whole)
    text = config.read_text().replace('"split": "90,10,0", ', "")
    config.write_text(text.replace(f'"data_path": "{corpus}", ', "", 1))
    for size, micro in ((1, 1), (dp, 1), (dp, 2)):
        (tmp_path / f"{size}-{micro}").mkdir()
        overrides = [f"training.eval_micro_batch_size={micro}"]
        on_ranks(size, train, config, overrides, tmp_path / f"{size}-{micro}")
    expected = losses_of(tmp_path / "1-1")
    assert len(expected) == 2
    for micro in (1, 2):
        assert losses_of(tmp_path / f"{dp}-{micro}") == pytest.approx(expected, rel=1e-6)


def test_b28_training_goes_round_the_data(corpus: Path, tmp_path: Path) -> None:
    """Three stages, six steps of four samples, and a corpus of five."""
    own = write_samples(tmp_path / "few", 5)
    config = small_config(
        tmp_path / "run.json",
        own,
        data={"split": "100,0,0"},
        model={"num_layers": 3},
        training={"train_iters": 6},
    )
    (tmp_path / "one").mkdir()
    (expected,) = on_ranks(1, train, config, [], tmp_path / "one")
    for run in on_ranks(3, train, config, layout(1, 3), tmp_path):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert len(run.losses) == 6


def leaves_while_evaluating(trainer: Trainer) -> None:
    """Ask a rank to leave amid the evaluation after its second step."""
    run = trainer._run

    def asking(purpose: str, *args: Any) -> Any:
        if purpose == "evaluation" and trainer.progress.iteration == 2:
            trainer.stop.ask("a test")
        return run(purpose, *args)

    trainer._run = asking  # type: ignore[method-assign]


def test_an_evaluation_that_was_broken_off_is_made_up_for(config: Path, tmp_path: Path) -> None:
    """The resumed run begins with it, and its metrics are those of the unbroken run."""
    overrides = [*EVERY_STEP, 'checkpoint.save="c"', "checkpoint.load=c"]
    overrides += ["checkpoint.exit_on_missing_checkpoint=false"]
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    on_ranks(1, train, config, overrides, tmp_path / "whole")
    on_ranks(1, train, config, overrides, tmp_path / "broken", leaves_while_evaluating)
    assert [row["iteration"] for row in rows(tmp_path / "broken", "valid")] == [1]
    on_ranks(1, train, config, overrides, tmp_path / "broken")
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "whole")
    assert [row["iteration"] for row in rows(tmp_path / "broken", "valid")] == [1, 2, 3, 4]


def fixed_sums(config: Path, overrides: list[str], run_dir: Path) -> float:
    """Evaluate two micro-batches of which one has loss 2 over 1 token, the other 90 over 9."""
    trainer = make_trainer(config, overrides, run_dir)
    data: Group = trainer.groups.data
    unmasked = [1, 9][data.rank :: data.size]

    def batches() -> Iterator[MicroBatch]:
        for count in unmasked:
            batch = random_batch(1, 16)
            batch.loss_mask[:, count:] = 0.0
            yield batch

    forward = trainer.engine.forward

    def prescribed(stage: int, batch: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        output = forward(stage, batch, hidden)
        if output.dim() > 0:
            return output
        return torch.tensor({1: 2.0, 9: 90.0}[int(batch.loss_mask.sum())])

    trainer.engine.forward = prescribed
    trainer.evaluations = {"valid": batches}
    return trainer.evaluate("valid")


@pytest.mark.parametrize(("world_size", "pp"), [(1, 1), (2, 1), (4, 2)])
def test_b55_validation_weighs_tokens_alike(
    world_size: int, pp: int, config: Path, tmp_path: Path
) -> None:
    """92 / 10 on every rank; the mean of the two means would be 6."""
    overrides = [*layout(1, pp), "training.eval_interval=1"]
    found = on_ranks(world_size, fixed_sums, config, overrides, tmp_path)
    assert found == pytest.approx([9.2] * world_size, rel=1e-6)
