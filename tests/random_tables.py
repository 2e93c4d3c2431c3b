"""Random legal tables: any placement of stages, any order in which each action finds its input.

For tests of the verifier, of the messages and of the executor. Knows nothing of the generators.
"""

from __future__ import annotations

import random

from megatron_lite.pipeline.actions import Action, Kind, Schedule


def random_table(seed: int, ranks: int) -> Schedule:
    """A legal table for `ranks` ranks, many with two directions or a split backward.

    Every rank holds a stage of the first direction at least. A second direction has a placement of
    its own, and at least one micro-batch.
    """
    chance = random.Random(seed)
    stages, count = ranks + chance.randrange(4), 1 + chance.randrange(5)
    placements = [_placement(chance, stages, ranks)]
    directions = [0] * count
    if count > 1 and chance.random() < 0.35:
        placements.append(_placement(chance, stages, ranks))
        directions[1:] = [1, *(chance.randrange(2) for _ in range(count - 2))]
        chance.shuffle(directions)
    split = chance.random() < 0.5
    kinds: tuple[Kind, ...] = ("F", "B", "W") if split else ("F", "B")
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    left = [Action(k, s, m) for k in kinds for s in range(stages) for m in range(count)]
    while left:
        action = chance.choice([a for a in left if inputs(a, stages) <= done])
        left.remove(action)
        done.add(action)
        rows[placements[directions[action.micro_batch]][action.stage]].append(action)
    return Schedule(
        name=f"random {seed}",
        num_stages=stages,
        num_ranks=ranks,
        num_microbatches=count,
        placements=tuple(tuple(placement) for placement in placements),
        directions=tuple(directions),
        actions=tuple(tuple(row) for row in rows),
        split_backward=split,
    )


def inputs(action: Action, stages: int) -> set[Action]:
    """What must have run before `action`, on whatever rank."""
    stage, micro = action.stage, action.micro_batch
    if action.kind == "W":
        return {Action("B", stage, micro)}
    if action.kind == "F":
        return {Action("F", stage - 1, micro)} if stage else set()
    own = {Action("F", stage, micro)}
    return own if stage == stages - 1 else own | {Action("B", stage + 1, micro)}


def _placement(chance: random.Random, stages: int, ranks: int) -> list[int]:
    homes = [*range(ranks), *(chance.randrange(ranks) for _ in range(stages - ranks))]
    chance.shuffle(homes)
    return homes
