"""`launch`: the machines a run asks for; the launch scripts read it, training only checks it."""

from __future__ import annotations

from megatron_lite.config.fields import DERIVE, Derived, Flag, PositiveWhole, Section


class LaunchConfig(Section):
    """The machines a run asks for."""

    nodes: PositiveWhole = 1
    """Machines."""

    gpus_per_node: Derived[PositiveWhole] = DERIVE
    """Processes, and GPUs where there are any, on each machine. null: tensor size x pipeline
    size."""

    requeue: Flag = False
    """Queue a Slurm job again when its time is over or a node or process was killed, until training
    is done or two restarts in a row brought no new checkpoint."""
