"""Which schedules and models the tests of whole runs by schedule go through."""

from __future__ import annotations

from tests.distributed.models import GPT, LLAMA
from tests.distributed.small import layout

SCHEDULES = ("gpipe", "1f1b", "interleaved", "chimera", "zb-h1", "zbv", "dualpipev")
SPLIT = ("zb-h1", "zbv", "dualpipev")
"""Those whose backward has two halves."""
LAYERS = 8
"""One for each stage where four ranks hold two stages each."""
MODELS = {name: m | {"num_layers": LAYERS} for name, m in (("tied", GPT), ("untied", LLAMA))}


def overrides(
    schedule: str, pp: int, zero: int, *, tp: int = 1, offload: str = "none"
) -> list[str]:
    """A layout with a schedule."""
    chosen = [*layout(tp, pp, zero=zero, offload=offload), f"parallel.pipeline_schedule={schedule}"]
    if schedule == "interleaved":
        chosen.append("parallel.virtual_pipeline_model_parallel_size=2")
    return chosen
