"""`parallel`: how the model is cut over ranks.

The data-parallel size has no key, it is derived: world size / (tensor x pipeline size).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from megatron_lite.config.fields import Flag, PositiveNumber, PositiveWhole, Section
from megatron_lite.pipeline.schedules import SCHEDULES
from megatron_lite.pipeline.table_files import is_table_file


def _schedule(value: Any) -> Any:
    if not isinstance(value, str) or not (value in SCHEDULES or is_table_file(value)):
        rule = "must be one of {names}, or a table's file (.json or .csv)"
        raise PydanticCustomError("schedule", rule, {"names": ", ".join(SCHEDULES)})
    return value


ScheduleName = Literal["gpipe", "1f1b", "interleaved", "chimera", "zb-h1", "zbv", "dualpipev"]
PipelineSchedule = Annotated[
    str, BeforeValidator(_schedule, json_schema_input_type=ScheduleName | str)
]


class ParallelConfig(Section):
    """How the model is cut over ranks."""

    tensor_model_parallel_size: PositiveWhole = 1
    """Ranks that share every layer. 1: layers are whole."""

    pipeline_model_parallel_size: PositiveWhole = 1
    """Ranks among which the layers are divided, in runs of consecutive ones. 1: no pipeline."""

    virtual_pipeline_model_parallel_size: PositiveWhole | None = None
    """Stages that a rank holds, for the schedule interleaved. null: as many as the schedule asks
    for, two with zbv and dualpipev, otherwise one."""

    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of a rank's forward and backward passes, by name: 1f1b one of each in turn, gpipe all
    forwards first, and more in README.md. Or the file of a table of your own, relative to the file
    that holds this."""

    pipeline_model_parallel_layout: tuple[PositiveWhole, ...] | None = None
    """Transformer layers of each stage, first stage first, such as [7, 9, 8]; a rank may hold
    several stages. null: as even as possible."""

    sequence_parallel: Flag = False
    """Cut norms and dropout along the sequence over the tensor-parallel ranks: less activation
    memory."""

    distributed_timeout_minutes: PositiveNumber = 10.0
    """Minutes without movement after which the run fails and names the rank that hangs; ranks also
    meet within them at the start. A collective by itself gives up a minute later."""
