"""`parallel`: how the model is cut over ranks.

The data-parallel size has no key, it is derived: world size / (tensor x pipeline size).
"""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import Flag, PositiveNumber, PositiveWhole, Section


class ParallelConfig(Section):
    """How the model is cut over ranks."""

    tensor_model_parallel_size: PositiveWhole = 1
    """Ranks that share every layer. 1: layers are whole."""

    pipeline_model_parallel_size: PositiveWhole = 1
    """Pipeline stages, each a run of consecutive layers. 1: no pipeline."""

    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of a stage's forward and backward passes: one forward, one backward in turn, or all
    forwards first."""

    pipeline_model_parallel_layout: tuple[PositiveWhole, ...] | None = None
    """Transformer layers of each stage, first stage first, such as [7, 9, 8]. null: as even as
    possible."""

    sequence_parallel: Flag = False
    """Cut norms and dropout along the sequence over the tensor-parallel ranks: less activation
    memory."""

    distributed_timeout_minutes: PositiveNumber = 10.0
    """Minutes without movement after which the run fails and names the rank that hangs; ranks also
    meet within them at the start. A collective by itself gives up a minute later."""
