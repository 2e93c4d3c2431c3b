"""Import of ZeRO checkpoints and export of universal ones; DeepSpeed and transformers judge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import STATES, Manifest
from megatron_lite.convert import foreign, universal, zero
from megatron_lite.convert.target import Target
from megatron_lite.data.loader import MicroBatch
from tests import deepspeed_runs
from tests.checkpoints import Arrays, read
from tests.deepspeed_runs import LENGTH, STEPS, Setup, Trained, section, tokens
from tests.distributed.models import write_config
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import logical_state, make_trainer, merged
from tests.hugging_face import as_gpt2, as_llama
from tests.logits import logits_of

CASES = {
    "llama, ZeRO-1": (Setup(stage=1, two_groups=True), 1),
    "llama tied with biases, ZeRO-2 on 2 ranks": (
        Setup(stage=2, tied=True, biases=True, two_groups=True),
        2,
    ),
    "llama in fp16, ZeRO-1 on 2 ranks": (Setup(stage=1, dtype="fp16"), 2),
    "gpt2, ZeRO-2 on 2 ranks": (Setup("gpt2", stage=2, offload=True), 2),
}


def converted(setup: Setup, source: Path, folder: Path) -> tuple[Target, Path]:
    """Import into `folder`/ours."""
    target = Target.read(
        write_config(folder / "run.json", folder / "none", section(setup), optimizer={"lr": 1e-2})
    )
    return target, foreign.write(folder / "ours", target, zero.read(source, target))


def renamed(setup: Setup, arrays: Arrays, state: str) -> dict[str, Tensor]:
    """One state of a checkpoint of ours under Hugging Face's names, by the tests' own table."""
    values = {name: torch.from_numpy(v) for (name, s), v in arrays.items() if s == state}
    if setup.model == "gpt2":
        return as_gpt2(values, 3)
    values.setdefault("output_layer.weight", values["embedding.word_embeddings.weight"])
    return as_llama(values, 3)


def assert_states(found: dict[tuple[str, str], np.ndarray], expected: Trained) -> None:
    """Bit by bit."""
    assert found.keys() == expected.saved.keys()
    for key, values in expected.saved.items():
        np.testing.assert_array_equal(found[key], values, str(key))


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """DeepSpeed → ours → DeepSpeed: the same numbers, logits and next step."""
    setup, ranks = CASES[name]
    theirs = on_ranks(ranks, deepspeed_runs.train, setup, tmp_path / "theirs")[0]
    target, folder = converted(setup, tmp_path / "theirs", tmp_path)

    arrays, manifest = read(folder), Manifest.read(folder)
    assert manifest.tensors == target.table
    assert manifest.step == theirs.steps == STEPS
    assert manifest.progress["consumed_samples"] == theirs.samples
    assert manifest.scalars["optimizer_step"] == theirs.adam_step
    ours = {
        (key, state): values.numpy()
        for state in STATES
        for key, values in renamed(setup, arrays, state).items()
        if (key, state) in theirs.saved
    }
    assert_states(ours, theirs)
    assert LENGTH >= 24
    tolerance = 1e-4 if setup.dtype == "fp32" else 0.05
    logits = logits_of(target, arrays, tokens(0)).numpy()
    assert theirs.logits is not None
    np.testing.assert_allclose(logits, theirs.logits, rtol=0, atol=tolerance)

    universal.export(folder, tmp_path / "back")
    again = replace(setup, stage=3 - setup.stage)
    back = on_ranks(3 - ranks, deepspeed_runs.resume, again, tmp_path / "back")[0]
    assert_states(back.saved, theirs)
    np.testing.assert_array_equal(back.logits, theirs.logits)
    assert (back.steps, back.samples, back.adam_step) == (STEPS, theirs.samples, theirs.adam_step)
    for key, values in theirs.after.items():
        if setup.dtype == "fp32":
            np.testing.assert_allclose(back.after[key], values, rtol=1e-3, atol=2e-5)


def test_reordered_parameters_are_refused(tmp_path: Path) -> None:
    """DeepSpeed's own record of where they lie is wrong then."""
    setup = Setup(stage=2, round_robin=True)
    on_ranks(2, deepspeed_runs.train, setup, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="round_robin_gradients on several ranks"):
        converted(setup, tmp_path / "theirs", tmp_path)


@dataclass
class Resumed:
    """What a rank of ours saw: its parts of the states, as loaded and one step later."""

    loaded: dict[str, Arrays]
    after: dict[str, Arrays]
    optimizer_step: int
    updates: int
    loss_scale: float


def go_on(config: Path, overrides: list[str], run_dir: Path) -> Resumed:
    """Load, and take a step on the batch that DeepSpeed took after it had saved."""
    trainer = make_trainer(config, overrides, run_dir)
    loaded = {state: logical_state(trainer.engine, state) for state in STATES}
    step = trainer.engine.scalars()["optimizer_step"]
    mask = torch.ones(1, LENGTH)
    mask[:, -1] = 0  # Hugging Face's loss has no label for the last token
    rows = tokens(STEPS).split(1)
    trainer.train_batches = iter([MicroBatch(row, row.roll(-1, dims=1), mask) for row in rows])
    trainer.iteration(10)
    after = {state: logical_state(trainer.engine, state) for state in STATES}
    trainer.report.close()
    trainer.engine.close()
    updates, scale = trainer.progress.updates, trainer.engine.loss_scale
    return Resumed(loaded, after, step, updates, scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp16", 0.01)])
def test_our_run_goes_on_from_it(
    tmp_path: Path, corpus: Path, dtype: str, tolerance: float
) -> None:
    """Tensor 2 with ZeRO-2 resumes from two ranks of DeepSpeed's ZeRO-1, and steps as they do.

    `tolerance` is relative to the largest number of a tensor.
    """
    setup = Setup(stage=1, two_groups=True, dtype=dtype)
    theirs = on_ranks(2, deepspeed_runs.train, setup, tmp_path / "theirs")[0]
    _, folder = converted(setup, tmp_path / "theirs", tmp_path)
    config = write_config(
        tmp_path / "go_on.json",
        corpus,
        section(setup),
        training={"global_batch_size": 4},
        optimizer={"lr": 1e-2},
        precision={"dtype": dtype},
    )
    overrides = [
        "parallel.tensor_model_parallel_size=2",
        "deepspeed.zero_optimization.stage=2",
        f'checkpoint.load="{folder.parent}"',
    ]
    ranks = on_ranks(2, go_on, config, overrides, tmp_path)
    arrays = read(folder)
    for state in STATES:
        for name, values in merged([rank.loaded[state] for rank in ranks]).items():
            np.testing.assert_array_equal(values, arrays[name, state], f"{name} ({state})")
    assert [(rank.optimizer_step, rank.updates) for rank in ranks] == [(STEPS, STEPS + 1)] * 2
    assert {rank.loss_scale for rank in ranks} == {theirs.loss_scale}
    after = {
        (name, state): values
        for state in STATES
        for name, values in merged([rank.after[state] for rank in ranks]).items()
    }
    for state in STATES:
        for name, values in renamed(setup, after, state).items():
            expected = theirs.after[name, state]
            off = tolerance * np.abs(expected).max()
            np.testing.assert_allclose(
                values, expected, rtol=0, atol=off, err_msg=f"{name} {state}"
            )
