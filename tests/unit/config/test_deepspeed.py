"""The derived DeepSpeed configuration: complete, and every explicit value arrives (case B58)."""

from __future__ import annotations

import json

import pytest

from megatron_lite.config.deepspeed import deepspeed_config
from megatron_lite.config.render import render_resolved


def derived(load, changes=None, *, dp: int = 2):
    return deepspeed_config(load(changes).config, dp)


def test_batches_describe_one_hand_over(load) -> None:
    config = derived(load, dp=4)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["train_batch_size"] == 8
    assert config["gradient_accumulation_steps"] == 1
    assert config["managed_gradient_accumulation"] is False
    assert not {"optimizer", "scheduler", "data_types"} & set(config)


@pytest.mark.parametrize(("given", "clipping"), [(1.0, 1.0), (0.5, 0.5), (0, 0.0), (..., 1.0)])
def test_b58_clipping_arrives_even_if_it_equals_the_default(load, given, clipping) -> None:
    assert derived(load, {"training": {"clip_grad": given}})["gradient_clipping"] == clipping


def test_b58_loss_scale_arrives(load) -> None:
    precision = {
        "dtype": "fp16",
        "initial_loss_scale": 4096,
        "min_loss_scale": 4,
        "loss_scale_window": 50,
        "hysteresis": 3,
    }
    config = derived(load, {"precision": precision})
    assert config["fp16"] == {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 50,
        "hysteresis": 3,
        "consecutive_hysteresis": False,
        "min_loss_scale": 4,
    }
    fixed = derived(load, {"precision": {"dtype": "fp16", "loss_scale": 128}})
    assert fixed["fp16"]["loss_scale"] == 128.0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exactly_the_wanted_format_is_on(load, dtype: str) -> None:
    config = derived(load, {"precision": {"dtype": dtype}})
    assert config["fp16"]["enabled"] == (dtype == "fp16")
    assert config["bf16"] == {"enabled": dtype == "bf16", "check_grad_overflow": True}


def test_b58_values_written_explicitly_arrive_though_they_are_defaults(load) -> None:
    plain = derived(load)
    explicit = load().config.deepspeed.model_dump(mode="json")
    assert derived(load, {"deepspeed": explicit}) == plain


def test_b58_every_value_arrives_under_deepspeeds_own_key(load) -> None:
    zero = {
        "stage": 3,
        "reduce_bucket_size": 1e6,
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "sub_group_size": 5,
        "stage3_prefetch_bucket_size": 6,
        "stage3_param_persistence_threshold": 7,
        "stage3_model_persistence_threshold": 8,
        "stage3_max_live_parameters": 9,
        "stage3_max_reuse_distance": 10,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/a",
            "pin_memory": False,
            "ratio": 0.5,
            "buffer_count": 6,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": True,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/b",
            "pin_memory": False,
            "buffer_count": 7,
            "buffer_size": 8,
            "max_in_cpu": 9,
        },
    }
    aio = {"block_size": 4096, "queue_depth": 2, "intra_op_parallelism": 3}
    aio |= {"single_submit": True, "overlap_events": False, "use_gds": True}
    comms = {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"], "verbose": True}
    section = {"zero_optimization": zero, "aio": aio, "wall_clock_breakdown": True}
    section["comms_logger"] = comms
    changes = {"deepspeed": section, "logging": {"deepspeed_log_level": "error"}}
    config = derived(load, changes)
    assert config["zero_optimization"].items() >= zero.items()
    assert config["aio"] == aio
    assert config["comms_logger"].items() >= comms.items()
    assert config["wall_clock_breakdown"] is True
    assert config["log_level"] == "error"


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": {"dtype": "bf16"}},
        {
            "precision": {"dtype": "fp16", "hysteresis": 3},
            "deepspeed": {
                "zero_optimization": {
                    "stage": 2,
                    "overlap_comm": True,
                    "round_robin_gradients": True,
                    "allgather_bucket_size": 1000,
                    "offload_optimizer": {"device": "cpu", "pin_memory": False},
                },
                "comms_logger": {"enabled": True},
            },
        },
        {
            "precision": {"dtype": "fp32"},
            "deepspeed": {
                "zero_optimization": {
                    "stage": 3,
                    "stage3_max_live_parameters": 5,
                    "offload_param": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 9},
                }
            },
        },
    ],
)
def test_deepspeed_reads_every_key(load, changes) -> None:
    """DeepSpeed's own parser takes the dictionary, and what it read is what was written."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = derived(load, changes, dp=1)
    read = DeepSpeedConfig(config)
    assert read.train_batch_size == config["train_batch_size"]
    assert read.gradient_clipping == config["gradient_clipping"]
    assert read.managed_gradient_accumulation is False
    assert read.steps_per_print == config["steps_per_print"]
    assert read.log_level == config["log_level"]
    assert read.wall_clock_breakdown == config["wall_clock_breakdown"]
    assert read.aio_config == config["aio"]
    assert read.zero_allow_untested_optimizer is False
    assert read.zero_force_ds_cpu_optimizer is False
    blocks = (
        (read.zero_config, "zero_optimization"),
        (read.float16_config, "fp16"),
        (read.bfloat16_config, "bf16"),
    )
    for block, name in blocks:
        seen = block.model_dump(mode="json", by_alias=True)
        for key, value in config[name].items():
            if isinstance(value, dict):
                assert seen[key].items() >= value.items()
            else:
                assert seen[key] == value
    if "comms_logger" in config:
        assert read.comms_config.comms_logger.enabled is True


def test_rendering_shows_origins_and_the_derived_dictionary(load) -> None:
    loaded = load({"training": {"clip_grad": 0.5}})
    text = render_resolved(loaded)
    line = next(line for line in text.splitlines() if '"clip_grad"' in line)
    assert '"clip_grad": 0.5,' in line and "// " in line and "run.json:1" in line
    assert any('"seed": 1234,' in x and x.endswith("// default") for x in text.splitlines())
    shown, derived_text = text.split("// DeepSpeed, derived for 1 ranks (data parallel 1):\n")
    plain = "\n".join(line.split("  // ")[0] for line in shown.splitlines())
    assert json.loads(plain) == loaded.config.model_dump(mode="json")
    assert json.loads(derived_text) == deepspeed_config(loaded.config, 1)
