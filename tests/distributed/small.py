"""Runs that are as small as a layout allows, for tests that need many of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.distributed.models import GPT, write_config

TINY = GPT | {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "seq_length": 16,
}


def small_config(path: Path, corpus: Path, **sections: Any) -> Path:
    """A config of the TINY model with four samples a step; `sections` are merged over it."""
    sections["training"] = {"global_batch_size": 4} | sections.get("training", {})
    return write_config(path, corpus, TINY | sections.pop("model", {}), **sections)


def layout(tp: int = 1, pp: int = 1, *, zero: int = 1, offload: str = "none") -> list[str]:
    """Overrides for a layout."""
    return [
        f"parallel.tensor_model_parallel_size={tp}",
        f"parallel.pipeline_model_parallel_size={pp}",
        f"deepspeed.zero_optimization.stage={zero}",
        f'deepspeed.zero_optimization.offload_optimizer={{"device": "{offload}"}}',
    ]


def rows(run_dir: Path, event: str = "train") -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of one kind."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each TensorBoard tag in the order of writing, from the event files."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name != "scalars":
                    continue
                number = float(tensor_util.make_ndarray(value.tensor))
                found[value.tag].append((event.step, number))
    return dict(found)
