"""Where DeepSpeed's ZeRO 1 and 2 keep each parameter in the flat states of their ranks.

A group's parameters lie end to end in the order of `param_shapes`, and each rank has an equal
stretch of that. What the ranks say themselves (`param_slice_mappings`) must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.checkpoint.manifest import STATES
from megatron_lite.convert.foreign import Shapes, refuse

_DISORDER = (
    "its ranks name other places for their parameters than the order of param_shapes gives. A run "
    "with zero_optimization.round_robin_gradients on several ranks saves such checkpoints, which "
    "are not read, since DeepSpeed itself mistakes their optimizer states. Without that flag, "
    "load_checkpoint(load_optimizer_states=False) takes the weights over: train and save from there"
)


@dataclass(frozen=True)
class Fragment:
    """A stretch of a parameter: `numel` numbers from `start` on in a rank's flat states."""

    flat: Mapping[str, Tensor]
    start: int
    numel: int


def fragments(
    folder: Path, ranks: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]
) -> dict[str, list[Fragment]]:
    """The stretches of each parameter in the order of the ranks, which is theirs in it.

    `ranks` are their optimizer parts, `groups` the shapes by name of each parameter group.
    CheckpointError where a rank says otherwise, or numbers are missing.
    """
    found: dict[str, list[Fragment]] = {}
    disorder, short = [], []
    for number, shapes in enumerate(groups):
        first = 0
        for rank in ranks:
            flat = _flat_states(rank, number)
            length = flat[STATES[0]].numel()  # without the padding at the end of the group
            places = _places(shapes, first, length)
            first += length
            disorder += _disorder(rank, number, places)
            for state, values in flat.items():
                if values.numel() < length:
                    short.append(f"{rank['path'].name}: {state} of group {number} is too short")
            for name, place in places.items():
                found.setdefault(name, []).append(Fragment(flat, *place))
        if first < (wanted := sum(map(prod, shapes.values()))):
            short.append(f"group {number}: the ranks' files hold {first} of its {wanted} numbers")
    refuse(f"{folder}: numbers are missing", short)
    refuse(f"{folder}: {_DISORDER}", disorder)
    return found


def _places(shapes: Shapes, first: int, length: int) -> dict[str, tuple[int, int]]:
    """(start, numel) of each parameter in the numbers [first, first + length) of its group."""
    found, at = {}, 0
    for name, shape in shapes.items():
        low, high = max(at, first), min(at + prod(shape), first + length)
        if low < high:
            found[name] = (low - first, high - low)
        at += prod(shape)
    return found


def _disorder(
    rank: Mapping[str, Any], group: int, places: Mapping[str, tuple[int, int]]
) -> list[str]:
    """A line for the first parameter that a rank says to have elsewhere."""
    slices = rank["param_slice_mappings"][group]
    said = {name: (address.start, address.numel) for name, address in slices.items()}
    for name in sorted(said.keys() | places.keys()):
        there, place = said.get(name), places.get(name)
        if there != place:
            return [f"{rank['path'].name}: {name} (start, count) is {there}, not {place}"]
    return []


def _flat_states(rank: Mapping[str, Any], group: int) -> dict[str, Tensor]:
    """A rank's flat master weights and moments of one parameter group."""
    moments = rank["base_optimizer_state"]["state"].get(group, {})
    lacking = [state for state in STATES[1:] if state not in moments]
    if lacking:
        raise CheckpointError(
            f"{rank['path']}: group {group} has no {', '.join(lacking)}; only Adam's states are "
            "converted, of a run that has made a step"
        )
    fp32 = rank["single_partition_of_fp32_groups"][group]
    return {STATES[0]: fp32, **{state: moments[state] for state in STATES[1:]}}
