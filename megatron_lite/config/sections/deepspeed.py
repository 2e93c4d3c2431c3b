"""`deepspeed`: ZeRO and its offload, under DeepSpeed's own names and defaults (0.19.8).

Only keys that act on this project's engines exist; `suggest` says why another one is refused,
`config.deepspeed` adds what follows from the other sections.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Le

from megatron_lite.config.fields import Flag, Fraction, PositiveWhole, Section, Text, Whole

Device = Literal["none", "cpu", "nvme"]


class OffloadOptimizer(Section):
    """Where optimizer states live and the optimizer step runs."""

    device: Device = "none"
    """none: on the GPU; cpu: in host memory; nvme (ZeRO-3): on a local disk."""

    nvme_path: Text | None = None
    """Absolute folder on a local disk; needed with nvme."""

    pin_memory: Flag = True
    """Use page-locked host memory: faster copies, cannot be swapped out."""

    ratio: Fraction = 1.0
    """Share of the optimizer states that is offloaded; below 1 with ZeRO-3 only."""

    buffer_count: PositiveWhole = 4
    """Buffers of the nvme pool; Adam needs four."""

    pipeline_read: Flag = False
    """nvme: read the next tile during the computation of this one."""

    pipeline_write: Flag = False
    """nvme: write the last tile during the computation of this one."""

    fast_init: Flag = False
    """nvme: faster first setting up of the states."""


class OffloadParam(Section):
    """Where the weights live between uses; ZeRO-3 only."""

    device: Device = "none"
    """none: on the GPU; cpu: in host memory; nvme: on a local disk."""

    nvme_path: Text | None = None
    """Absolute folder on a local disk; needed with nvme."""

    pin_memory: Flag = True
    """Use page-locked host memory: faster copies, cannot be swapped out."""

    buffer_count: PositiveWhole = 5
    """Buffers of the nvme pool."""

    buffer_size: PositiveWhole = 100_000_000
    """Elements of one nvme buffer."""

    max_in_cpu: Whole = 1_000_000_000
    """Elements that stay in host memory with nvme."""


class ZeroOptimization(Section):
    """What the data-parallel ranks share instead of copying."""

    stage: Annotated[Whole, Le(3)] = 1
    """1: optimizer states; 2: and gradients; 3: and weights (without a pipeline)."""

    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Optimizer states outside GPU memory."""

    offload_param: OffloadParam = OffloadParam()
    """Weights outside GPU memory; ZeRO-3 only."""

    overlap_comm: Flag = False
    """Reduce gradients on a second stream; ZeRO-2 only."""

    reduce_bucket_size: PositiveWhole = 500_000_000
    """Elements of one gradient reduction."""

    allgather_bucket_size: PositiveWhole = 500_000_000
    """Elements of one gathering of updated weights, an even number; ZeRO-1 and 2."""

    contiguous_gradients: Flag = True
    """Copy gradients into one buffer as they come: less fragmentation."""

    reduce_scatter: Flag = True
    """Reduce each gradient to its owner only, rather than to every rank."""

    round_robin_gradients: Flag = False
    """Spread the copying of offloaded gradients over the ranks; ZeRO-1 and 2. Refused with several
    replicas, where DeepSpeed would mistake one parameter's optimizer states for another's."""

    sub_group_size: PositiveWhole = 1_000_000_000
    """Elements of one tile of the optimizer step; ZeRO-3 only."""

    stage3_prefetch_bucket_size: Whole = 50_000_000
    """Elements fetched ahead of use; ZeRO-3 only. 0: none."""

    stage3_param_persistence_threshold: Whole = 100_000
    """Weights smaller than this many elements are not cut; ZeRO-3 only."""

    stage3_model_persistence_threshold: Whole = 2**63 - 1
    """Elements of uncut weights in total, at most; ZeRO-3 only."""

    stage3_max_live_parameters: Whole = 1_000_000_000
    """Elements of gathered weights in GPU memory at once; ZeRO-3 only."""

    stage3_max_reuse_distance: Whole = 1_000_000_000
    """Keep a weight that is used again within this many elements; ZeRO-3 only."""


class Aio(Section):
    """Asynchronous disk access of nvme offload."""

    block_size: PositiveWhole = 1_048_576
    """Bytes of one request."""

    queue_depth: PositiveWhole = 8
    """Requests in flight."""

    intra_op_parallelism: PositiveWhole = 1
    """Threads that share one tensor."""

    single_submit: Flag = False
    """Hand requests to the system one by one."""

    overlap_events: Flag = True
    """Wait for finished requests while handing over new ones."""

    use_gds: Flag = False
    """Copy between disk and GPU without host memory (GPUDirect Storage)."""


class CommsLogger(Section):
    """Log of the collectives that DeepSpeed runs."""

    enabled: Flag = False
    """Record time and size of collectives."""

    prof_all: Flag = True
    """Record every kind of collective."""

    prof_ops: tuple[Text, ...] = ()
    """Kinds to record, such as "all_reduce", where prof_all is false."""

    verbose: Flag = False
    """Print each collective as it happens."""

    debug: Flag = False
    """Add the calling function to each record."""


class DeepSpeedSection(Section):
    """ZeRO and its offload."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What the data-parallel ranks share."""

    aio: Aio = Aio()
    """Asynchronous disk access of nvme offload."""

    wall_clock_breakdown: Flag = False
    """Time the parts of DeepSpeed's step."""

    comms_logger: CommsLogger = CommsLogger()
    """Log of DeepSpeed's collectives."""
