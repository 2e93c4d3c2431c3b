"""`launch`: the machines a run asks for; the launch scripts read it, training only checks it."""

from __future__ import annotations

from megatron_lite.config.fields import DERIVE, Derived, PositiveWhole, Section


class LaunchConfig(Section):
    """The machines a run asks for."""

    nodes: PositiveWhole = 1
    """Machines."""

    gpus_per_node: Derived[PositiveWhole] = DERIVE
    """Processes, and GPUs where there are any, on each machine. null: tensor size x pipeline
    size."""
