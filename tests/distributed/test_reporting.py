"""What a run reports is true on every layout: losses, speed, memory, and tags that keep apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lite import report
from megatron_lite.checkpoint.save import Save
from megatron_lite.data.loader import MicroBatch
from megatron_lite.monitoring.timers import StepTimer
from megatron_lite.trainer import Trainer
from tests.distributed.faults import poison
from tests.distributed.models import LLAMA, write_config, write_corpus
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import merged, train
from tests.distributed.small import layout, rows, scalars, small_config

BOARD = {"tensorboard_dir": "tensorboard"}


def mask_some(trainer: Trainer) -> None:
    """Mask a different number of tokens of every sample, by what the tokens are."""

    def masked(batch: MicroBatch) -> MicroBatch:
        keep = (batch.tokens * 7 + batch.tokens[:, :1]) % 5 > batch.tokens[:, :1] % 4
        return replace(batch, loss_mask=keep.float())

    trainer.train_batches = map(masked, trainer.train_batches)


def test_b55_training_loss_and_gradient_weigh_tokens_alike(corpus: Path, tmp_path: Path) -> None:
    """Unequal masks, four micro-batches on each of two replicas: as one batch in one process."""
    config = small_config(
        tmp_path / "run.json", corpus, training={"global_batch_size": 8, "train_iters": 3}
    )
    (tmp_path / "one").mkdir()
    whole = ["training.micro_batch_size=8"]
    (one,) = on_ranks(1, train, config, whole, tmp_path / "one", mask_some)
    runs = on_ranks(4, train, config, layout(1, 2, zero=2), tmp_path, mask_some)
    for run in runs:
        assert run.losses == runs[0].losses, "the same on whichever rank logs"
        assert run.losses == pytest.approx(one.losses, rel=1e-5)
        assert run.norms == pytest.approx(one.norms, rel=1e-5)
    assert [row["lm_loss"] for row in rows(tmp_path)] == runs[0].losses
    found, expected = (merged([r.first_moments for r in parts]) for parts in (runs, [one]))
    name = "layers.1.mlp.down.weight"
    assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7)
    plain = on_ranks(1, train, config, whole, tmp_path / "one")[0]
    assert plain.losses[0] != pytest.approx(one.losses[0], rel=1e-4), "the masks must matter"


def test_b52_validation_and_test_have_their_own_curves(corpus: Path, tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run.json",
        corpus,
        training={"train_iters": 20, "eval_interval": 5, "eval_iters": 1},
        data={"split": "80,10,10"},
        logging=BOARD,
    )
    on_ranks(2, train, config, layout(1, 2), tmp_path)
    board = scalars(tmp_path / "tensorboard")
    validation = board["lm loss validation"]
    assert [step for step, _ in validation] == [5, 10, 15, 20]
    assert [step for step, _ in board["lm loss validation vs samples"]] == [20, 40, 60, 80]
    assert [step for step, _ in board["lm loss test"]] == [20]
    assert [step for step, _ in board["lm loss"]] == list(range(1, 21))
    assert not {"params-norm", "num-zeros"} & board.keys(), "they cost, and nobody asked"
    for tag, points in board.items():
        steps = [step for step, _ in points]
        assert steps == sorted(steps), tag
    for part in ("validation", "test"):
        for (step, loss), (same, ppl) in zip(
            board[f"lm loss {part}"], board[f"lm loss {part} ppl"], strict=True
        ):
            assert step == same and ppl == pytest.approx(math.exp(loss), rel=1e-5)
    logged = [row["lm_loss"] for row in rows(tmp_path, "valid")]
    assert [loss for _, loss in validation] == pytest.approx(logged, rel=1e-6)
    (test,) = rows(tmp_path, "test")
    assert test["iteration"] == 20 and test["lm_loss"] != logged[-1]


class Clock:
    """Two seconds a step; a save takes ten."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def two_seconds_a_step(trainer: Trainer) -> None:
    clock = Clock()
    trainer.timer = trainer.saver._timer = StepTimer(clock)
    step, write = trainer.engine.step, Save.write

    def slow_step(lr: float) -> object:
        clock.now += 2.0
        return step(lr)

    def slow_write(self: Save) -> None:
        clock.now += 10.0
        write(self)

    trainer.engine.step = slow_step
    Save.write = slow_write  # type: ignore[method-assign]


@pytest.mark.parametrize("interval", [1, 5])
def test_b54_tokens_per_second_and_flops(interval: int, tmp_path: Path) -> None:
    model = LLAMA | {
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "vocab_size": 256,
    }
    config = write_config(
        tmp_path / "run.json",
        write_corpus(tmp_path / "corpus", vocab=256),
        model,
        training={"micro_batch_size": 2, "global_batch_size": 12, "train_iters": 10},
        checkpoint={"save": "checkpoints", "save_interval": 3},
        logging={"log_interval": interval},
    )
    on_ranks(4, train, config, layout(2, 1), tmp_path, two_seconds_a_step)
    logged = rows(tmp_path)
    assert len(logged) == 10 // interval
    for row in logged:
        assert row["tokens_per_second"] == pytest.approx(192.0)
        assert row["elapsed_ms_per_iteration"] == pytest.approx(2000.0)
        # 1,032,192 FLOPs a token in the matrices with the whole square of scores, on 4 ranks.
        assert row["tflops_per_gpu"] == pytest.approx(192 * 1_032_192 / 4 / 1e12, rel=1e-9)
    assert [row["elapsed_ms"] for row in rows(tmp_path, "save")] == pytest.approx([10_000.0] * 4)


def pretend_memory(heard: Path, trainer: Trainer) -> None:
    """Let rank r report r + 1 MiB, and rank 2 most; keep what is printed."""
    rank = dist.get_rank()
    report.peak_memory_bytes = lambda kind: (9 if rank == 2 else rank + 1) << 20
    if rank == 0:
        trainer.report._echo = lambda line: heard.open("a").write(line + "\n")


def test_b55_memory_is_that_of_the_rank_that_needs_most(corpus: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run.json", corpus, training={"train_iters": 2}, logging=BOARD)
    heard = tmp_path / "heard"
    fake: Callable[[Trainer], None] = partial(pretend_memory, heard)
    on_ranks(4, train, config, layout(1, 2), tmp_path, fake)
    board = scalars(tmp_path / "tensorboard")
    assert board["mem-max-allocated-bytes"] == [(1, 9 << 20), (2, 9 << 20)]
    assert "max resident (MiB): 9.0 | on rank 2" in heard.read_text()
    (tmp_path / "true").mkdir()
    on_ranks(1, train, config, [], tmp_path / "true")
    for _, peak in scalars(tmp_path / "true/tensorboard")["mem-max-allocated-bytes"]:
        assert peak > 50 << 20, "a resident size, not 0"


def delay_the_first_stage(heard: Path, trainer: Trainer) -> None:
    """Rank 0 sleeps in every forward, so that rank 1 waits for it."""
    if dist.get_rank() == 0:
        (stage,) = trainer.engine.modules().values()
        stage.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        trainer.report._echo = lambda line: heard.open("a").write(line + "\n")


def delay_and_poison(trainer: Trainer) -> None:
    """Rank 0 sleeps in its forwards, and the gradients of iteration 3 are not finite."""
    poison(trainer, steps=[3])
    if dist.get_rank() == 0:
        (stage,) = trainer.engine.modules().values()
        stage.register_forward_pre_hook(lambda *_: time.sleep(0.05))


def test_stage_times_are_those_of_training_alone(corpus: Path, tmp_path: Path) -> None:
    """Neither evaluations and saves of each step nor a skipped step's second run count."""
    config = small_config(
        tmp_path / "run.json",
        corpus,
        training={"train_iters": 4, "eval_interval": 1, "eval_iters": 1, "on_nan": "skip"},
        checkpoint={"save": "checkpoints", "save_interval": 1},
    )
    on_ranks(2, train, config, layout(1, 2), tmp_path, delay_and_poison)
    logged = rows(tmp_path)
    assert [row["skipped_iterations"] for row in logged] == [0, 0, 1, 0]
    assert len(rows(tmp_path, "valid")) == len(rows(tmp_path, "save")) == 4
    assert len(rows(tmp_path, "nonfinite")) == 1
    for row in logged:
        assert 4 * 50 <= row["stage_forward_ms"][0] < 6 * 50, "of four micro-batches"
        assert row["stage_idle_ms"][1] < row["elapsed_ms_per_iteration"]
        assert 0.2 < row["bubble"] < 0.6


def test_the_slowest_rank_is_named_and_not_who_waits_for_it(corpus: Path, tmp_path: Path) -> None:
    """The line comes once, not at every log step."""
    config = small_config(tmp_path / "run.json", corpus, training={"train_iters": 4}, logging=BOARD)
    heard = tmp_path / "heard"
    on_ranks(2, train, config, layout(1, 2), tmp_path, partial(delay_the_first_stage, heard))
    logged = rows(tmp_path)[1:]  # the first step also makes the buffers
    assert [row["slowest_rank"] for row in logged] == [0, 0, 0]
    assert all(row["slowest_rank_ratio"] > 1.5 for row in logged)
    for row in logged:
        own = row["slowest_rank_share"] * row["elapsed_ms_per_iteration"]
        assert 4 * 50 <= own <= row["elapsed_ms_per_iteration"]
        assert row["stage_forward_ms"][0] >= 4 * 50 > row["stage_forward_ms"][1]
        assert row["stage_idle_ms"][1] > 100 > row["stage_idle_ms"][0]
        assert row["simulated_bubble"] == pytest.approx(1 / 5, abs=0.01), "were the stages alike"
        assert row["simulated_bubble"] + 0.1 < row["bubble"] < 0.6
    assert heard.read_text().count(" slowest rank at iteration") == 1
    board = scalars(tmp_path / "tensorboard")
    for tag in ("slowest-rank", "slowest-rank-share", "slowest-rank-ratio"):
        key = tag.replace("-", "_")
        assert [value for _, value in board[tag][1:]] == pytest.approx([row[key] for row in logged])
    idle = [row["stage_idle_ms"][1] / 1000 for row in logged]
    assert [value for _, value in board["idle-time/stage 1"][1:]] == pytest.approx(idle)
    bubbles = [row["bubble"] for row in logged]
    assert [value for _, value in board["pipeline-bubble"][1:]] == pytest.approx(bubbles)
