"""What to write instead of a key that does not exist.

A near spelling, the section it belongs in, its name here, or the reason why there is none.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, get_args

from megatron_lite.config.fields import Section
from megatron_lite.config.json_text import join
from megatron_lite.config.schema import RunConfig

# Names from other programs, and names that people expect, with the key that has their meaning here.
ALIASES = MappingProxyType(
    {
        "fp16": "precision.dtype",
        "bf16": "precision.dtype",
        "bfloat16": "precision.dtype",
        "params_dtype": "precision.dtype",
        "initial_scale_power": "precision.initial_loss_scale",
        "learning_rate": "optimizer.lr",
        "betas": "optimizer.adam_beta1 and adam_beta2",
        "eps": "optimizer.adam_eps",
        "gradient_clipping": "training.clip_grad",
        "max_grad_norm": "training.clip_grad",
        "train_batch_size": "training.global_batch_size",
        "train_micro_batch_size_per_gpu": "training.micro_batch_size",
        "max_steps": "training.train_iters",
        "activation_checkpointing": "training.recompute_granularity",
        "data_types": "precision.dtype and accumulate_grads_in_fp32",
        "communication_data_type": "precision.dtype",
        "zero_stage": "deepspeed.zero_optimization.stage",
        "log_level": "logging.deepspeed_log_level",
        "steps_per_print": "logging.log_interval",
        "tensorboard": "logging.tensorboard_dir",
        "csv_monitor": "logging.csv_dir",
        "wandb": "logging.wandb_project",
        "tensor_parallel_size": "parallel.tensor_model_parallel_size",
        "tensor_parallel": "parallel.tensor_model_parallel_size",
        "pipeline_parallel_size": "parallel.pipeline_model_parallel_size",
        "pipeline": "parallel.pipeline_model_parallel_size",
    }
)

# Names that have no key here, with the reason.
REASONS = MappingProxyType(
    {
        "gradient_accumulation_steps": "derived from the batch sizes of section training",
        "data_parallel_size": "derived: world size / (tensor x pipeline size)",
        "scheduler": "the learning rate is set in section optimizer",
        "zero_allow_untested_optimizer": "the engine brings its own optimizer",
        "zero_force_ds_cpu_optimizer": "the engine brings its own optimizer",
        "grad_accum_dtype": "use precision.accumulate_grads_in_fp32",
        "prescale_gradients": "the engine averages over unmasked tokens itself",
        "gradient_predivide_factor": "the engine averages over unmasked tokens itself",
        "managed_gradient_accumulation": "the engine hands gradients over once a step",
        "comet": "curves go to TensorBoard, CSV files or Weights & Biases (section logging)",
        "flops_profiler": "throughput is in metrics.jsonl and TensorBoard",
        "cpu_offload": 'use offload_optimizer: {"device": "cpu"}',
        "cpu_offload_params": 'use offload_param: {"device": "cpu"}',
        "compute_grad_norm": "always on: clipping and the log need the norm",
        "load_from_fp32_weights": "checkpoints always keep fp32 weights",
        "stage3_gather_16bit_weights_on_model_save": "checkpoints do not go through DeepSpeed",
        "allgather_partitions": "has no effect in DeepSpeed 0.19.8",
        "ignore_unused_parameters": "every parameter gets a gradient here",
    }
)


def unknown_key(path: str, key: str, section: type[Section]) -> tuple[str, str]:
    """(rule, suggestion) for `key`, found in the object at `path`, whose class is `section`."""
    name = f'section "{path}"' if path else "a configuration"
    rule = f"is not a key of {name}"
    if key in REASONS:
        return rule, REASONS[key]
    homes = [where for where, known in configuration_objects() if key in known.model_fields]
    if homes == [""]:
        return rule, f'use section "{key}", beside "{path.partition(".")[0]}"'
    if len(homes) == 1:
        return rule, f'this key belongs in section "{homes[0]}"'
    if key in ALIASES and ALIASES[key] != join(path, key):
        return rule, f"use {ALIASES[key]}"
    if near := difflib.get_close_matches(key, section.model_fields, n=1):
        return rule, f'did you mean "{near[0]}"?'
    everywhere = {
        name: join(where, name)
        for where, known in configuration_objects()
        for name in known.model_fields
    }
    if near := difflib.get_close_matches(key, everywhere, n=1, cutoff=0.75):
        return rule, f"did you mean {everywhere[near[0]]}?"
    if len(section.model_fields) <= 12:
        return rule, f"its keys are {', '.join(section.model_fields)}"
    return rule, ""


def section_class(annotation: Any) -> type[Section] | None:
    """The section that a field holds (`X` or `X | None`); None where it holds a plain value."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def configuration_objects(
    path: str = "", section: type[Section] = RunConfig
) -> Iterator[tuple[str, type[Section]]]:
    """(path, class) of every object of the configuration, outermost first."""
    yield path, section
    for name, field in section.model_fields.items():
        if inner := section_class(field.annotation):
            yield from configuration_objects(join(path, name), inner)
