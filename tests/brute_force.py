"""Another, slower judge of tables: runs them in random order of ranks and looks at what was done.

Shares no code with the package's verifier and messages: results lie on the rank that made them,
and a finished action copies its result to the rank of the neighbouring stage.
"""

from __future__ import annotations

import random
from collections import Counter

from megatron_lite.pipeline.actions import Action, Schedule


def comes_to_its_end(schedule: Schedule, seed: int) -> bool:
    """Whether every piece of work can be done, once, where its stage is, in the rows' order."""
    chance = random.Random(seed)
    tokens: list[Counter[tuple[str, int, int]]] = [Counter() for _ in schedule.actions]
    queues = [list(row) for row in schedule.actions]
    last, split = schedule.num_stages - 1, schedule.split_backward

    def home(stage: int, micro_batch: int) -> int:
        return schedule.placements[schedule.directions[micro_batch]][stage]

    for i in range(schedule.num_microbatches):
        tokens[home(0, i)]["activation", 0, i] += 1
        for s in range(schedule.num_stages):
            tokens[home(s, i)]["to do", s, i] += 1

    def wants(action: Action) -> list[str]:
        if action.kind == "F":
            return ["activation", "to do"]
        return ["kept", "gradient"] if action.kind == "B" else ["left for W"]

    def able(rank: int) -> bool:
        action = queues[rank][0]
        at = action.stage, action.micro_batch
        return all(tokens[rank][(want, *at)] > 0 for want in wants(action))

    def give(what: str, stage: int, micro_batch: int) -> None:
        tokens[home(stage, micro_batch)][what, stage, micro_batch] += 1

    def run(rank: int) -> None:
        action = queues[rank].pop(0)
        s, i = action.stage, action.micro_batch
        for want in wants(action):
            tokens[rank][want, s, i] -= 1
        if action.kind == "F":
            give("kept", s, i)
            if s < last:
                give("activation", s + 1, i)
            else:
                give("gradient", s, i)
        elif action.kind == "B":
            if s > 0:
                give("gradient", s - 1, i)
            give("left for W" if split else "done", s, i)
        else:
            give("done", s, i)

    while any(queues):
        ranks = [rank for rank, queue in enumerate(queues) if queue and able(rank)]
        if not ranks:
            return False
        run(chance.choice(ranks))
    done = sum(n for held in tokens for (what, _, _), n in held.items() if what == "done")
    return done == schedule.num_stages * schedule.num_microbatches
