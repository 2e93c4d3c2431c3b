"""`launch`: the machines a run asks for, which the launch scripts read, and their check."""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import (
    DERIVE,
    Derived,
    Flag,
    PositiveWhole,
    Section,
    Text,
    Variables,
)


class LaunchConfig(Section):
    """The machines a run asks for, and their check."""

    nodes: PositiveWhole = 1
    """Machines."""

    gpus_per_node: Derived[PositiveWhole] = DERIVE
    """Processes, and GPUs where there are any, on each machine. null: tensor size x pipeline
    size."""

    environment: Variables = {}  # noqa: RUF012, pydantic copies it
    """Variables for each process, such as NCCL_DEBUG, set before torch is loaded; one that is set
    already keeps its value. No secrets: the run folder and checkpoints keep a copy."""

    requeue: Flag = False
    """Queue a Slurm job again when its time is over, a node or process was killed or the run hung,
    until training is done or two starts in a row brought no new checkpoint."""

    cpus_per_task: PositiveWhole | None = None
    """Processor cores for each process of a Slurm job and its loader workers. null: Slurm's
    default, mostly one."""

    time: Text | None = None
    """Time limit of a Slurm job, as sbatch reads it (such as 1-12:00:00). null: the site's, or the
    partition's."""

    partition: Text | None = None
    """Slurm partition. null: the site's, or Slurm's default."""

    account: Text | None = None
    """Slurm account. null: the site's, or the user's default."""

    job_name: Text | None = None
    """Name of the Slurm job. null: that of the run folder."""

    preflight: Literal["full", "nodes", "off"] = "full"
    """What is checked before the model is built: code, config, versions, files, folders and clocks
    of all ranks (nodes), and also an all-reduce over each group (full)."""
