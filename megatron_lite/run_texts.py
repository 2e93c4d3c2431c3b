"""The texts that TensorBoard shows of a run: its config, what it runs on, who holds what.

Called by session.py once a start, on all ranks, since each tells what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import nn

from megatron_lite.engine.measures import part_of
from megatron_lite.layers.context import placement_of
from megatron_lite.monitoring.environment import as_table, environment_facts
from megatron_lite.mpu.grid import AXES
from megatron_lite.mpu.reductions import gather_texts
from megatron_lite.rendezvous import node_name
from megatron_lite.trainer import Trainer


def run_texts(trainer: Trainer, env: Mapping[str, str]) -> dict[str, str]:
    """Markdown by tag, on rank 0; nothing on the others. Collective."""
    own = [
        node_name(env),
        *(f"stage {n}: {holds(m)}" for n, m in sorted(trainer.engine.modules().items())),
    ]
    told = {rank: text.split("\n") for rank, text in gather_texts("\n".join(own)).items()}
    grid = trainer.groups.grid
    if grid.rank > 0:
        return {}
    rows = []
    for rank, (node, *stages) in sorted(told.items()):
        place = grid.at(rank).coordinates
        rows.append((str(rank), node, *(str(place[a]) for a in AXES), "; ".join(stages)))
    facts = {"nodes": ", ".join(dict.fromkeys(node for node, *_ in told.values()))}
    facts |= environment_facts(env, trainer.device)
    return {
        "config": f"```json\n{json.dumps(trainer.resolved, indent=2)}\n```",
        "environment": as_table(("what", "value"), list(facts.items())),
        "layout": as_table(("rank", "node", *AXES, "holds"), rows),
    }


def holds(stage: nn.Module) -> str:
    """The parts of the model that a stage holds, in order: `embedding, layers.0 to layers.3`."""
    names = [part_of(name) for p in stage.parameters() for name in placement_of(p).names]
    names = list(dict.fromkeys(names))
    layers = [name for name in names if name.startswith("layers.")]
    if len(layers) < 3:
        return ", ".join(names)
    first = names.index(layers[0])
    names[first : first + len(layers)] = [f"{layers[0]} to {layers[-1]}"]
    return ", ".join(names)
