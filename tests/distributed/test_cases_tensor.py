"""Cases of tensor parallelism: vocabulary padding, parameters with copies, few key/value heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import load_config
from megatron_lite.data.indexed_builder import IndexedDatasetBuilder
from megatron_lite.layers.context import Init, LayerContext, placement_of
from megatron_lite.layers.embedding import VocabParallelEmbedding, padded_vocab_size
from megatron_lite.mpu.groups import Group
from megatron_lite.trainer import Trainer
from tests.distributed.many import Run, train_on
from tests.distributed.plain import assert_close
from tests.distributed.runs import Result, merged
from tests.distributed.small import layout, small_config

SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
STEPS = {"train_iters": 20, "global_batch_size": 2}


def compare(results: list[Result], reference: Result, *, rel: float = 1e-4) -> None:
    """Loss curves, norms, gradients of the first step and weights after the last one."""
    for result in results:
        assert result.losses[0] == pytest.approx(reference.losses[0], rel=1e-5)
        assert result.norms[0] == pytest.approx(reference.norms[0], rel=1e-5)
        assert result.losses == pytest.approx(reference.losses, rel=rel)
    assert_close(merged([r.first_moments for r in results]), merged([reference.first_moments]))


def zero_output(trainer: Trainer) -> None:
    """Output weights of zero: every token of the true vocabulary is equally likely."""
    for fragment in trainer.engine.fragments():
        for piece in fragment.pieces:
            if piece.tensor == "output_layer.weight":
                fragment.view("fp32", piece).zero_()
    trainer.engine.refresh()


def zero_output_and_rubbish_padding(trainer: Trainer) -> None:
    """The same, and rows of padding that would win every softmax that let them."""
    zero_output(trainer)
    stage = trainer.engine.modules()[0]
    with torch.no_grad():
        for parameter in stage.parameters():
            held = sum(segment.box.size[0] for segment in placement_of(parameter).segments)
            parameter[held:] = 50.0


def write_uneven_corpus(prefix: Path) -> Path:
    """Tokens below 33 of which the small ones are the more frequent, so that there is something
    to learn."""
    rng = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(str(prefix), np.uint16)
    for _ in range(20):
        builder.add_document((33 * rng.random(100) ** 4).astype(np.int64))
    builder.finalize()
    return prefix


def test_b18_padding_takes_no_part(tmp_path: Path) -> None:
    path = small_config(
        tmp_path / "run.json",
        write_uneven_corpus(tmp_path / "corpus"),
        model={
            "vocab_size": 33,
            "make_vocab_size_divisible_by": 8,
            "untie_embeddings_and_output_weights": True,
        },
        training=STEPS,
        optimizer={"lr": 1e-2},
    )
    found = {}
    for tp in (1, 2, 4):
        once = [*layout(tp), "training.train_iters=1"]
        runs = [
            Run(path, layout(tp), zero_output),
            Run(path, once, zero_output_and_rubbish_padding),
        ]
        found[tp] = train_on(tp, runs, tmp_path)
    reference = found[1][0][0]
    assert reference.losses[-1] < reference.losses[0] - 0.5, "nothing was learnt"
    for clean, rubbish in found.values():
        compare(clean, reference)
        for one, other in zip(clean, rubbish, strict=True):
            assert one.losses[0] == pytest.approx(math.log(33), rel=1e-6)
            assert other.losses[0] == one.losses[0], "padding entered the softmax"
            assert other.norms[0] == one.norms[0], "padding has a gradient"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_b18_padded_size_is_the_same_on_every_layout(tp: int) -> None:
    padded = padded_vocab_size(50257, 128)
    assert padded == 50304
    ranks = tuple(range(tp))
    tables = [
        VocabParallelEmbedding(
            LayerContext(group=Group(ranks, rank)), "e", 50257, 1, padded=padded, init=Init()
        ).weight
        for rank in ranks
    ]
    assert {len(table) for table in tables} == {50304 // tp}
    held = [p.box.size[0] for table in tables for p in placement_of(table).pieces()]
    assert sum(held) == 50257


def test_b18_a_multiple_that_does_not_divide_is_refused(corpus: Path, tmp_path: Path) -> None:
    path = small_config(tmp_path / "run.json", corpus, model={"make_vocab_size_divisible_by": 6})
    with pytest.raises(ConfigError, match="make_vocab_size_divisible_by 6"):
        load_config(path, layout(4), 4)


def copies(trainer: Trainer) -> Iterator[tuple[str, bytes]]:
    """(name, hash) of the values and the first moments that every rank of a group holds alike."""
    for parameter in trainer.engine.modules()[0].parameters():
        placement = placement_of(parameter)
        if not placement.tensor_sharded:
            yield f"{placement.names}", parameter.detach().numpy().tobytes()
    for fragment in trainer.engine.fragments():
        if not fragment.placement.tensor_sharded:
            for state, values in fragment.states.items():
                yield f"{state} of {fragment.placement.names}", values.numpy().tobytes()


def check_copies(trainer: Trainer) -> None:
    """Note the copies after every step, and compare those of all ranks after the last one."""
    step, history = trainer.engine.step, list[dict[str, str]]()

    def noting(lr: float) -> Any:
        outcome = step(lr)
        history.append({name: blake2b(v).hexdigest() for name, v in copies(trainer)})
        if len(history) == STEPS["train_iters"]:
            compare_copies(history)
        return outcome

    trainer.engine.step = noting  # type: ignore[method-assign]


def compare_copies(history: list[dict[str, str]]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, history)
    assert len(history[0]) > 50
    for rank, other in enumerate(everyone):
        for number, (mine, theirs) in enumerate(zip(history, other, strict=True), start=1):
            apart = [name for name in mine if theirs[name] != mine[name]]
            assert not apart, f"step {number}: rank {rank} has other copies of {apart}"


def test_b20_copies_stay_equal_and_right(corpus: Path, tmp_path: Path) -> None:
    """Biases, all norms, learned positions and query/key norms, sequence parallelism off and on."""
    path = small_config(
        tmp_path / "run.json",
        corpus,
        model={"qk_layernorm": True},
        training=STEPS,
        # With a larger epsilon Adam does not blow up gradients that are rounding and nothing else.
        optimizer={"adam_eps": 1e-4},
    )
    ((reference,),) = train_on(1, [Run(path, layout())], tmp_path)
    expected = merged([reference.weights])
    for tp in (2, 4):
        kinds = [layout(tp), [*layout(tp), SEQUENCE_PARALLEL]]
        for results in train_on(tp, [Run(path, kind, check_copies) for kind in kinds], tmp_path):
            compare(results, reference)
            found = merged([result.weights for result in results])
            for name, values in expected.items():
                np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


FEW_HEADS = {"num_attention_heads": 8, "num_query_groups": 2, "hidden_size": 32}


def test_b21_two_key_value_heads_on_two_ranks(corpus: Path, tmp_path: Path) -> None:
    path = small_config(tmp_path / "run.json", corpus, model=FEW_HEADS, training=STEPS)
    ((reference,),) = train_on(1, [Run(path, layout())], tmp_path)
    (results,) = train_on(2, [Run(path, layout(2))], tmp_path)
    compare(results, reference)


@pytest.mark.parametrize(("tp", "says"), [(4, "num_query_groups 2"), (3, "num_attention_heads 8")])
def test_b21_fewer_key_value_heads_than_ranks_are_refused(
    tp: int, says: str, corpus: Path, tmp_path: Path
) -> None:
    path = small_config(tmp_path / "run.json", corpus, model=FEW_HEADS)
    with pytest.raises(ConfigError) as caught:
        load_config(path, layout(tp), tp)
    problems = [p for p in caught.value.problems if says in p.rule]
    assert [p.value for p in problems] == [tp]
    assert "1" in problems[0].suggestion
    assert "2" in problems[0].suggestion


def test_sequence_parallel_trains_the_same_model(corpus: Path, tmp_path: Path) -> None:
    """With ZeRO-3, whose gradients are summed elsewhere, with a pipeline and with replicas."""
    path = small_config(
        tmp_path / "run.json",
        corpus,
        model={"qk_layernorm": True},
        training={"train_iters": 3},
    )
    ((reference,),) = train_on(1, [Run(path, layout())], tmp_path)
    pairs = [layout(2, zero=zero, offload=where) for zero, where in ((2, "cpu"), (3, "none"))]
    fours = [layout(4, zero=3), layout(2, 2), layout(2, zero=3), layout(2, zero=2)]
    for ranks, kinds in ((2, pairs), (4, fours)):
        runs = [Run(path, [*kind, SEQUENCE_PARALLEL]) for kind in kinds]
        for results in train_on(ranks, runs, tmp_path):
            compare(results, reference)
