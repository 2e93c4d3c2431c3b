"""What was not finite first is found and named, on any layout; the run does what it was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import Result, train
from tests.distributed.small import layout, rows, small_config
from tests.distributed.wrong_numbers import Case, Spoil, run_cases

STOP = "training.on_nan=stop"
BF16 = 'precision.dtype="bf16"'
RECOMPUTE = ['training.recompute_granularity="full"', "model.hidden_dropout=0.1"]


@pytest.fixture(scope="module")
def config(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps in fp32, two micro-batches on each of two replicas."""
    return small_config(
        tmp_path_factory.mktemp("nonfinite") / "run.json", corpus, training={"train_iters": 3}
    )


def written(run_dir: Path, iteration: int = 2) -> dict[str, Any]:
    return json.loads((run_dir / f"nonfinite/iteration_{iteration}.json").read_text())


def facts(finding: dict[str, Any], *names: str) -> list[Any]:
    return [finding[name] for name in names]


def test_the_first_bad_value_is_named(config: Path, tmp_path: Path) -> None:
    """Forward, backward and weight; pipeline, tensor and data parallel; ZeRO 1 to 3; recomputed."""
    cases = [
        Case([*layout(1, 2), STOP], Spoil("forward", "layers.0.mlp.down", 3, micro_batch=1)),
        Case(
            [*layout(2, 1, zero=2), BF16, STOP],
            Spoil("backward", "layers.1.attention.query_key_value", 1),
        ),
        Case([*layout(2, 2), STOP], Spoil("weight", "layers.0.post_attention_norm.weight", 2)),
        Case(
            [*layout(2, 1, zero=3), BF16, STOP, *RECOMPUTE],
            Spoil("forward", "layers.1.attention.output", 2, micro_batch=1),
        ),
        Case(
            [*layout(1, 2), STOP, 'parallel.pipeline_schedule="zb-h1"'],
            Spoil("backward", "layers.0.mlp", 0, micro_batch=1),
        ),
        Case(
            [*layout(1, 2), STOP, 'parallel.pipeline_schedule="chimera"'],
            Spoil("forward", "layers.0.mlp.down", 3, stage=0),
        ),
    ]
    everyones = on_ranks(4, run_cases, config, cases, tmp_path, watchdog=120)
    assert all(errors == everyones[0] for errors in everyones), "all ranks tell the same"
    errors, names = everyones[0], ("rank", "stage", "layer", "phase", "micro_batch", "name")
    told = [written(tmp_path / str(number)) for number in range(6)]
    firsts = [one["findings"][0] for one in told]
    assert [one["reproduced"] for one in told] == [True] * 6
    assert told[0]["micro_batches_not_finite"] == {"replica 1": [1]}
    assert told[2]["micro_batches_not_finite"] == {"replica 0": [0, 1, 2, 3]}

    assert facts(firsts[0], *names) == [3, 1, 1, "forward", 1, "layers.1.mlp.down"]
    assert facts(firsts[0], "tensor", "dp_rank", "pp_rank") == ["output", 1, 1]
    assert firsts[0]["values"] | {"smallest": 0, "largest": 0} == {
        "shape": [16, 32],
        "dtype": "float32",
        "nan": 1,
        "infinite": 0,
        "first": [0, 3],
        "smallest": 0,
        "largest": 0,
    }
    # Iteration 2 begins at sample 4; micro-batches of one alternate between the replicas.
    (sample,) = firsts[0]["samples"]
    assert sample["sample"] == 7 and sample["documents"][0]["tokens"] > 0
    assert "iteration 2" in errors[0] and "rank 3 (stage 1): layers.1.mlp.down, output" in errors[0]
    assert "sample 7: number 7" in errors[0] and "document" in errors[0]

    assert facts(firsts[1], *names[:-1]) == [1, 0, 1, "backward", 0]
    assert facts(firsts[1], "name", "tensor") == [
        "layers.1.attention.query_key_value",
        "gradient of the output",
    ]
    assert facts(firsts[2], *names) == [
        2,
        1,
        1,
        "weight",
        None,
        "layers.1.post_attention_norm.weight",
    ]
    assert "rank 2 (stage 1): layers.1.post_attention_norm.weight, weight before" in errors[2]
    assert facts(firsts[3], *names) == [2, 0, 1, "forward", 1, "layers.1.attention.output"]
    assert firsts[3]["samples"][0]["sample"] == 7, "rank 2 is the second replica"
    assert facts(firsts[4], *names) == [0, 0, 0, "backward", 1, "layers.0.mlp"]
    # Its second direction begins on the last rank, with the second micro-batch of the replica.
    assert facts(firsts[5], *names) == [3, 0, 0, "forward", 1, "layers.0.mlp.down"]
    assert firsts[5]["samples"][0]["sample"] == 7
    for number in range(6):
        (row,) = rows(tmp_path / str(number), "nonfinite")
        assert (row["iteration"], row["action"]) == (2, "stop")
        assert row["file"].endswith("nonfinite/iteration_2.json")


def leave_no_trace(trainer: Trainer) -> None:
    """A step that is bad once, and good when it is run again."""
    Spoil("forward", "layers.0.mlp.down", again=False)(trainer)


def without_replay(trainer: Trainer) -> None:
    """The same, but nobody looks for the cause."""
    trainer.guard.forensics._replay = lambda taken: []  # type: ignore[method-assign]
    leave_no_trace(trainer)


def train_both(config: Path, overrides: list[str], folder: Path) -> list[Result]:
    (folder / "blind").mkdir()
    return [
        train(config, overrides, folder, leave_no_trace),
        train(config, overrides, folder / "blind", without_replay),
    ]


@pytest.mark.parametrize(("zero", "offload"), [(2, "cpu"), (3, "none"), (3, "cpu")])
def test_a_fault_that_does_not_come_again_is_told_and_the_run_goes_on(
    zero: int, offload: str, config: Path, tmp_path: Path
) -> None:
    """It goes on as if nobody had looked, dropout and all."""
    overrides = [*layout(zero=zero, offload=offload), "model.hidden_dropout=0.1"]
    ((seen, blind),) = on_ranks(1, train_both, config, overrides, tmp_path)
    assert seen.applied == [True, False, True]
    assert seen.losses[2] == blind.losses[2] and seen.norms[2] == blind.norms[2]
    told = written(tmp_path)
    assert not told["reproduced"] and told["findings"] == []
    assert told["losses_not_finite"] == {"rank 0": [0]}
    assert told["loss"] == "NaN" and told["not_finite"] == "loss"
    (row,) = rows(tmp_path, "nonfinite")
    assert row["action"] == "skip" and "not reproducible" in row["story"]
    assert "Not finite in the step itself: rank 0 on " in row["story"]
    assert [row["nan_iterations"] for row in rows(tmp_path)] == [0, 1, 0]


def test_a_sum_over_micro_batches_that_overflows(config: Path, tmp_path: Path) -> None:
    fp16 = ['precision.dtype="fp16"', "precision.loss_scale=1", STOP, *layout(1, 2)]
    fp16.append("precision.accumulate_grads_in_fp32=false")
    case = Case(fp16, overflow_in_the_sum_of_stage_1)
    (errors, _) = on_ranks(2, run_cases, config, [case], tmp_path)
    assert "rank 1 (stage 1): layers.1.mlp.up.weight, gradient as the sum over" in errors[0]
    (finding,) = written(tmp_path / "0", 1)["findings"]
    assert facts(finding, "phase", "micro_batch", "values") == ["sum", None, None]


def overflow_in_the_sum_of_stage_1(trainer: Trainer) -> None:
    """Gradients of 40,000 in each micro-batch: their sum is beyond fp16."""
    (stage,) = trainer.engine.modules().values()
    if stage.last:
        weight = stage.layers[0].mlp.up.weight
        weight.register_hook(lambda grad: grad.clone().fill_(40000.0))


def test_a_loss_that_is_not_finite_beside_finite_gradients(config: Path, tmp_path: Path) -> None:
    case = Case([STOP], loss_beside_gradients)
    (errors,) = on_ranks(1, run_cases, config, [case], tmp_path)
    assert "iteration 2: the loss is inf, although all gradients were finite" in errors[0]


def loss_beside_gradients(trainer: Trainer) -> None:
    """What autograd does not see."""
    (stage,) = trainer.engine.modules().values()

    def after(module: Any, inputs: Any, output: Any) -> Any:
        return output + float("inf") if trainer.progress.iteration == 1 else output

    stage.head.register_forward_hook(after)
