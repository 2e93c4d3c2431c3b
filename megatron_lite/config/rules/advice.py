"""Legal choices that cost speed, one line each. Runs on a valid configuration, refuses nothing."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config.batch import data_parallel_size, num_microbatches
from megatron_lite.config.rules.pipeline import ends_and_directions, num_stages, table_of
from megatron_lite.config.schema import RunConfig
from megatron_lite.pipeline.simulate import Times, simulate_shares
from megatron_lite.pipeline.table_files import is_table_file

MOST_TO_SIMULATE = 5_000
"""(Stage, micro-batch) pairs of a table; the time for more is not spent on a warning."""
LEAST_IDLE = 0.01
"""The share of a step that is worth one."""


def idle_stages(cfg: RunConfig, world_size: int) -> Iterator[str]:
    """A pipeline fills and drains, which takes a share of each step."""
    pp, training = cfg.parallel.pipeline_model_parallel_size, cfg.training
    dp = data_parallel_size(world_size, cfg.parallel)
    count = num_microbatches(training.global_batch_size, training.micro_batch_size, dp)
    if pp == 1 or count >= 4 * pp:
        return
    if num_stages(cfg) * count > MOST_TO_SIMULATE:
        idle = "for a share of a step that tools/pipeline_timeline.py tells"
    else:
        share = simulate_shares(table_of(cfg, count), Times()).bubble_fraction
        if share < LEAST_IDLE:
            return
        idle = f"{share:.0%} of a step"
    what = "fewer than the stages, so that never all work" if count < pp else "few"
    enough = f"global_batch_size {4 * pp * training.micro_batch_size * dp}"
    if is_table_file(cfg.parallel.pipeline_schedule):
        enough += f" with a table for {4 * pp}"
    yield (
        f"{count} micro-batches for {pp} pipeline stages are {what}: stages idle {idle}; "
        f"{enough} would give 4 micro-batches a stage"
    )


def tensor_parallel_leaves_the_node(cfg: RunConfig, world_size: int) -> Iterator[str]:
    """Tensor parallelism talks in every layer and wants the fast links inside a node."""
    tp, gpus = cfg.parallel.tensor_model_parallel_size, cfg.launch.gpus_per_node
    if tp > gpus:
        yield (
            f"tensor_model_parallel_size {tp} is more than launch.gpus_per_node {gpus}: "
            "every layer waits for the network"
        )
    elif tp > 8:
        yield f"tensor_model_parallel_size {tp} is more than the 8 GPUs that nodes commonly link"


def thin_shards(cfg: RunConfig, world_size: int) -> Iterator[str]:
    """Small matrices keep a GPU poorly busy."""
    hidden, tp = cfg.model.hidden_size, cfg.parallel.tensor_model_parallel_size
    if hidden >= 8192 and hidden / tp < 1024:
        yield (
            f"tensor_model_parallel_size {tp} leaves {hidden // tp} of {hidden} hidden columns "
            "to a rank; below 1024 its matrices are small for a GPU"
        )


def endless_warm_up(cfg: RunConfig, world_size: int) -> Iterator[str]:
    """A short trial of a long schedule may end within warm-up, so this is no fault."""
    warm_up, decay = cfg.optimizer.lr_warmup_iters, cfg.optimizer.lr_decay_iters
    if warm_up >= decay:
        yield (
            f"lr_warmup_iters {warm_up} is not below lr_decay_iters {decay}: "
            "the learning rate has no gradual decay"
        )


def nothing_to_compare(cfg: RunConfig, world_size: int) -> Iterator[str]:
    """One config for many layouts is no fault; that its check finds nothing should be known."""
    parallel, zero = cfg.parallel, cfg.deepspeed.zero_optimization
    if not cfg.training.check_replicas_interval or parallel.tensor_model_parallel_size > 1:
        return
    tied = not cfg.model.untie_embeddings_and_output_weights
    if zero.stage < 3 and data_parallel_size(world_size, parallel) > 1:
        return
    first, last, ways = ends_and_directions(cfg)
    if ways == 1 and not (tied and first != last):
        yield (
            "training.check_replicas_interval has nothing to compare: no two ranks hold copies "
            "of the same weights on this layout"
        )


ADVICE = (
    idle_stages,
    tensor_parallel_leaves_the_node,
    thin_shards,
    endless_warm_up,
    nothing_to_compare,
)
