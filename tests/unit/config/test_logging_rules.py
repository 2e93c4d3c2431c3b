"""What is reported: keys that nothing would read, windows that can't be, old names."""

from __future__ import annotations

import re
from typing import Any

import pytest

NOTHING = {"tensorboard_dir": None}


@pytest.mark.parametrize(
    ("logging", "field", "words"),
    [
        ({"wandb_exp_name": "a"}, "wandb_exp_name", "without logging.wandb_project"),
        (NOTHING | {"log_histograms_interval": 10}, "log_histograms_interval", "tensorboard_dir"),
        (NOTHING | {"log_params_norm": True}, "log_params_norm", "where no curves"),
        (NOTHING | {"log_num_zeros_in_grad": True}, "log_num_zeros_in_grad", "where no curves"),
        ({"log_histograms_interval": 15}, "log_histograms_interval", "use 10 or 20"),
        ({"profile_step_start": 7}, "profile_step_start", "without logging.profile"),
        ({"profile_step_end": 12}, "profile_step_end", "without logging.profile"),
        ({"profile_ranks": [1]}, "profile_ranks", "without logging.profile"),
        ({"profile": True, "profile_step_end": 11}, "profile_step_end", "at least 12.*use 14"),
        ({"profile": True, "profile_step_end": 112}, "profile_step_end", "101 iterations"),
        ({"profile": True, "profile_ranks": []}, "profile_ranks", "names no rank"),
        ({"profile": True, "profile_ranks": [0, 1]}, "profile_ranks", "the run has 1"),
    ],
)
def test_refused(problems: Any, logging: dict[str, Any], field: str, words: str) -> None:
    found = problems({"logging": logging}, world_size=1)
    assert list(found) == [f"logging.{field}"]
    assert re.search(words, str(found[f"logging.{field}"]))


@pytest.mark.parametrize(
    ("logging", "last"),
    [
        ({}, 14),
        ({"profile": True}, 14),
        ({"profile": True, "profile_step_start": 20}, 24),
        ({"profile": True, "profile_step_end": 12}, 12),
        (NOTHING | {"csv_dir": "csv", "log_params_norm": True}, 14),
        ({"log_histograms_interval": 20}, 14),
    ],
)
def test_accepted(load: Any, logging: dict[str, Any], last: int) -> None:
    assert load({"logging": logging}).config.logging.profile_step_end == last


def test_states_on_nvme_are_not_measured(problems: Any) -> None:
    offload = {"device": "nvme", "nvme_path": "/disk"}
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    found = problems({"deepspeed": zero, "logging": {"log_params_norm": True}})
    assert list(found) == ["logging.log_params_norm"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("csv_monitor", "use logging.csv_dir"),
        ("wandb", "use logging.wandb_project"),
        ("tensorboard", "use logging.tensorboard_dir"),
        ("comet", "CSV files or Weights & Biases"),
    ],
)
def test_deepspeeds_monitors_are_refused_with_the_key_to_use(
    problems: Any, key: str, words: str
) -> None:
    found = problems({"deepspeed": {key: {"enabled": True}}})
    assert words in found[f"deepspeed.{key}"].suggestion
