"""Keys of the section `checkpoint` that nothing would read, and states that can't be saved."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"launch": {"requeue": True}}, "checkpoint.load", r"would go on from"),
        (
            {"launch": {"requeue": True}, "checkpoint": {"save": "c", "load": "c"}},
            "checkpoint.exit_on_missing_checkpoint",
            r"would refuse the first start",
        ),
        ({"checkpoint": {"strict": False}}, "checkpoint.strict", r"without checkpoint.load"),
        (
            {"checkpoint": {"load": "c", "finetune": True, "no_load_rng": True}},
            "checkpoint.no_load_rng",
            r"no effect with checkpoint.finetune",
        ),
        (
            {"checkpoint": {"load": "c", "ckpt_step": 3, "fall_back_to_older": True}},
            "checkpoint.fall_back_to_older",
            r"no effect beside checkpoint.ckpt_step",
        ),
        (
            {
                "deepspeed": {
                    "zero_optimization": {
                        "stage": 3,
                        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
                    }
                },
                "checkpoint": {"save": "c"},
            },
            "checkpoint.save",
            r"states on nvme are not supported",
        ),
        (
            {
                "deepspeed": {
                    "zero_optimization": {
                        "stage": 3,
                        "offload_param": {"device": "nvme", "nvme_path": "/disk"},
                    }
                },
                "checkpoint": {"load": "c"},
            },
            "checkpoint.load",
            r"weights on nvme are not supported",
        ),
    ],
)
def test_refused(problems, changes, path: str, words: str) -> None:
    assert words in problems(changes)[path].rule


def test_reordered_gradients_need_a_single_replica(load, problems) -> None:
    """With several, a checkpoint would hold states under another parameter's name."""
    changes = {"deepspeed": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}}
    found = problems(changes, world_size=2)
    path = "deepspeed.zero_optimization.round_robin_gradients"
    assert found.keys() == {path} and "at data-parallel size 2" in found[path].rule
    load(changes | {"parallel": {"tensor_model_parallel_size": 2}}, world_size=2)
