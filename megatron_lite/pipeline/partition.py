"""Divides a model's transformer layers among pipeline stages.

Pure arithmetic on layer numbers: knows neither what a layer costs nor where it runs. Called when
a stage's model is built and by the planner.
"""

from __future__ import annotations

from collections.abc import Sequence


def partition_layers(
    num_layers: int, num_stages: int, layout: Sequence[int] | None = None
) -> list[range]:
    """The layer numbers of each stage: consecutive, in order, every layer exactly once.

    With `layout` (transformer layers per stage) the counts are taken as they are. Only the first
    and the last of several stages may have 0, as they keep the embedding and the head; a training
    run needs a layer on each, which its config's rules see to.
    Without it the stages are balanced: all get num_layers // num_stages, and the remainder goes
    one each to the stages from the last but one downwards. The last stage never gets one, since
    it also computes the head (up to several layers' worth) and the loss. Among the others a later
    stage is preferred, because under 1F1B stage i keeps num_stages - i micro-batches alive, and
    the first stage also stores the embedding and its optimizer state.

    Examples: 10 layers on 4 stages are 2, 3, 3, 2; 7 on 4 are 2, 2, 2, 1; 5 on 4 are 1, 1, 2, 1.
    Raises ValueError, naming both numbers, where this is impossible.
    """
    if num_layers < 1 or num_stages < 1:
        raise ValueError(
            f"num_layers ({num_layers}) and the number of stages ({num_stages}) must be at least 1"
        )
    counts = _balanced(num_layers, num_stages) if layout is None else list(layout)
    _check_counts(counts, num_layers, num_stages)
    ranges, first = [], 0
    for count in counts:
        ranges.append(range(first, first + count))
        first += count
    return ranges


def _balanced(num_layers: int, num_stages: int) -> list[int]:
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot be balanced over {num_stages} pipeline stages: a stage"
            f" needs a layer. Use at most {num_layers} stages, or give a layout with 0 layers on"
            " the first or last stage"
        )
    share, remainder = divmod(num_layers, num_stages)
    larger = range(num_stages - 1 - remainder, num_stages - 1)
    return [share + (stage in larger) for stage in range(num_stages)]


def _check_counts(counts: list[int], num_layers: int, num_stages: int) -> None:
    if len(counts) != num_stages:
        raise ValueError(
            f"the layout {counts} names {len(counts)} stages, but there are {num_stages}"
        )
    if sum(counts) != num_layers:
        raise ValueError(
            f"the layout {counts} has {sum(counts)} layers, but the model has {num_layers}"
        )
    for stage, count in enumerate(counts):
        inner = 0 < stage < num_stages - 1
        if count < 0 or (inner and count == 0):
            raise ValueError(
                f"stage {stage} of the layout {counts} has {count} layers: a stage between the"
                " first and the last needs at least 1, and no stage may have fewer than 0"
            )
