"""Cases of the norm, clipping and weighting: one number for the whole model in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.many import Run, train_on
from tests.distributed.plain import assert_close, mask_unequally, plain_step, unequal_mask
from tests.distributed.runs import Result, merged
from tests.distributed.small import layout, small_config

LLAMA = {
    "num_query_groups": 4,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
LAYOUTS: dict[int, list[tuple[str, list[str]]]] = {
    1: [("tied", layout(offload="cpu")), ("untied", layout(zero=2))],
    2: [
        ("tied", layout(2)),
        ("tied", [*layout(2), SEQUENCE_PARALLEL]),
        ("tied", layout(1, 2)),
        ("tied", layout(1, 2, zero=2, offload="cpu")),
        ("untied", layout(1, 2)),
        ("untied", layout(2, offload="cpu")),
        ("tied", layout(zero=3)),
    ],
    4: [
        ("tied", layout(4)),
        ("tied", layout(2, 2)),
        ("untied", [*layout(2, 2, zero=2), SEQUENCE_PARALLEL]),
        ("tied", layout(1, 2, zero=2)),
        ("tied", layout(2, zero=3)),
    ],
}
"""By number of ranks; what the layout leaves is data-parallel."""
UPDATE = {"lr": 1e-2, "adam_eps": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.9}
"""A large epsilon: with a small one Adam's first step does not depend on the gradient's length."""


@pytest.fixture(scope="module")
def configs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One step clipped far below the gradient's norm, by kind of output layer."""
    folder = tmp_path_factory.mktemp("norm")
    sections: dict[str, Any] = {
        "training": {"train_iters": 1, "clip_grad": 0.1},
        "optimizer": UPDATE,
    }
    return {
        "tied": small_config(folder / "tied.json", corpus, **sections),
        "untied": small_config(folder / "untied.json", corpus, model=LLAMA, **sections),
    }


def moments(results: list[Result]) -> dict[str, np.ndarray]:
    """The clipped gradient of the first step: exp_avg is (1 − β₁) of it."""
    parts = merged([result.first_moments for result in results])
    return {name: values / (1 - UPDATE["adam_beta1"]) for name, values in parts.items()}


def length(values: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((v.astype(np.float64) ** 2).sum() for v in values.values())))


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_b23_norm_and_clipped_step_in_every_layout(
    ranks: int, configs: dict[str, Path], tmp_path: Path
) -> None:
    expected = {name: plain_step(path) for name, path in configs.items()}
    runs = [Run(configs[model], overrides) for model, overrides in LAYOUTS[ranks]]
    found = train_on(ranks, runs, tmp_path)
    for (model, overrides), results in zip(LAYOUTS[ranks], found, strict=True):
        plain = expected[model]
        assert plain.norm > 0.5, "nothing would be clipped"
        for result in results:
            assert result.norms == pytest.approx([plain.norm], rel=1e-5), overrides
            assert result.losses == pytest.approx([plain.loss], rel=1e-5), overrides
        assert length(moments(results)) == pytest.approx(0.1, rel=1e-4), overrides
        assert_close(moments(results), plain.clipped)
        weights = merged([result.weights for result in results])
        for name, values in plain.weights.items():
            # No weight moves by more than lr.
            np.testing.assert_allclose(weights[name], values, rtol=0, atol=1e-4 * UPDATE["lr"])


CLIPS = {"1.0": 1.0, "0.5": 0.5, "0": float("inf"), None: 1.0}
"""The limit that each value of `training.clip_grad` sets; None: the key is absent."""


def test_b58_clip(corpus: Path, tmp_path: Path) -> None:
    path = small_config(
        tmp_path / "run.json",
        corpus,
        model={"init_method_std": 1.0},
        training={"train_iters": 1},
        optimizer=UPDATE,
    )
    kinds = [layout(), layout(offload="cpu"), layout(zero=2), layout(zero=3)]
    cases = [(limit, kind) for limit in CLIPS for kind in kinds]
    runs = [
        Run(path, kind if limit is None else [*kind, f"training.clip_grad={limit}"])
        for limit, kind in cases
    ]
    norm = plain_step(path).norm
    assert norm > 10
    for (limit, kind), results in zip(cases, train_on(1, runs, tmp_path), strict=True):
        assert results[0].norms == pytest.approx([norm], rel=1e-5)
        found = length(moments(results))
        assert found == pytest.approx(min(norm, CLIPS[limit]), rel=1e-4), (limit, kind)


def test_b58_clip_on_a_pipeline(corpus: Path, tmp_path: Path) -> None:
    path = small_config(
        tmp_path / "run.json",
        corpus,
        model={"init_method_std": 1.0},
        training={"train_iters": 1},
        optimizer=UPDATE,
    )
    runs = [Run(path, [*layout(1, 2), f"training.clip_grad={v}"]) for v in ("0.5", "0")]
    clipped, free = train_on(2, runs, tmp_path)
    assert length(moments(clipped)) == pytest.approx(0.5, rel=1e-4)
    assert length(moments(free)) == pytest.approx(plain_step(path).norm, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_b55_training_weights_every_token_alike(
    ranks: int, configs: dict[str, Path], tmp_path: Path
) -> None:
    """Rows with 0 to 16 unmasked tokens, spread over replicas and micro-batches."""
    batch = ["training.global_batch_size=8", "training.clip_grad=0"]
    layouts = {
        1: [layout(), layout(zero=3)],
        2: [layout(), layout(zero=3), layout(2), layout(1, 2)],
        4: [layout(), layout(1, 2, zero=2), [*layout(2), SEQUENCE_PARALLEL]],
    }[ranks]
    overrides = [
        [*kind, *batch, f"training.micro_batch_size={size}"] for kind in layouts for size in (1, 2)
    ]
    expected = plain_step(configs["tied"], batch, mask=unequal_mask)
    assert expected.loss != pytest.approx(plain_step(configs["tied"], batch).loss, rel=1e-3)
    runs = [Run(configs["tied"], kind, mask_unequally) for kind in overrides]
    for kind, results in zip(overrides, train_on(ranks, runs, tmp_path), strict=True):
        for result in results:
            assert result.losses == pytest.approx([expected.loss], rel=1e-5), kind
            assert result.norms == pytest.approx([expected.norm], rel=1e-5), kind
        assert_close(moments(results), expected.gradients)
