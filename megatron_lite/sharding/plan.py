"""Who holds what under a layout, and which stored boxes a wanted box is put together from.

Pure integers over a table of logical tensors; reads no file and knows no layer.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megatron_lite.sharding.placement import Box, Cut, shard_box

_LAYER = re.compile(r"layers\.(\d+)\.")


class Boxed(Protocol):
    """Something that lies in a box."""

    @property
    def box(self) -> Box: ...


B = TypeVar("B", bound=Boxed)


@dataclass(frozen=True)
class LogicalTensor:
    """Shape of a logical tensor, without padding, and how tensor parallelism cuts it."""

    shape: tuple[int, ...]
    cut: Cut | None


@dataclass(frozen=True)
class Copy(Generic[B]):
    """`part` of the tensor is to be copied from `source`."""

    source: B
    part: Box


def stage_of(name: str, layers: Sequence[range]) -> int:
    """The pipeline stage that counts a logical tensor, `layers[s]` being the layers of stage s.

    Numbered layers are where their number is; of the rest, the embedding is on the first stage
    (a tied head's copy on the last is not counted) and all else on the last. ValueError for a layer
    that no stage has.
    """
    match = _LAYER.match(name)
    if match is None:
        return 0 if name.startswith("embedding.") else len(layers) - 1
    for stage, held in enumerate(layers):
        if int(match[1]) in held:
            return stage
    raise ValueError(f"{name}: the model has only {layers[-1].stop} layers")


def shard_contents(
    tensors: Mapping[str, LogicalTensor],
    layers: Sequence[range],
    *,
    stage: int,
    tp_rank: int,
    tp_size: int,
) -> Iterator[tuple[str, Box]]:
    """The boxes that one (stage, tensor rank) counts, tensors in the table's order.

    Over all stages and ranks every element of every tensor comes exactly once. A rank that would
    hold nothing but padding of a tensor, or a copy, has no box of it. ValueError where a tensor
    can't be cut into `tp_size`.
    """
    for name, tensor in tensors.items():
        if stage_of(name, layers) != stage:
            continue
        if tensor.cut is None and tp_rank > 0:
            continue
        if tensor.cut is not None and tensor.cut.length % tp_size:
            raise ValueError(
                f"{name}: dimension {tensor.cut.dim} of length {tensor.cut.length} can't be cut "
                f"into {tp_size}"
            )
        box = shard_box(tensor.shape, tensor.cut, rank=tp_rank, size=tp_size)
        if box.numel:
            yield name, box


def differing_shapes(
    one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...] | None, tuple[int, ...] | None]]:
    """Tensors that two models don't have alike, by name, with both shapes; None: it has none."""
    pairs = {name: (one.get(name), other.get(name)) for name in sorted({*one, *other})}
    return {name: shapes for name, shapes in pairs.items() if shapes[0] != shapes[1]}


class Boxes(Generic[B]):
    """The stored boxes of one tensor, to be found quickly however many there are.

    Sorted by where they begin along the first dim; a cut there, by tensor parallelism or ZeRO, then
    leaves few to look at.
    """

    def __init__(self, stored: Iterable[B]) -> None:
        self._sorted = sorted(stored, key=lambda one: one.box.offset)
        self._begins = [_span(one.box)[0] for one in self._sorted]
        self._longest = max((b - a for a, b in (_span(one.box) for one in self._sorted)), default=0)

    def __iter__(self) -> Iterator[B]:
        return iter(self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    def meeting(self, wanted: Box) -> Iterator[Copy[B]]:
        """What each of them has in common with a box; those with nothing are left out."""
        begin, end = _span(wanted)
        first = bisect_right(self._begins, begin - self._longest)
        for source in self._sorted[first : bisect_left(self._begins, end)]:
            part = source.box.intersect(wanted)
            if part is not None:
                yield Copy(source, part)

    def overlap(self) -> bool:
        """Whether any two of them share an element."""
        return any(len(list(self.meeting(stored.box))) > 1 for stored in self._sorted)


def _span(box: Box) -> tuple[int, int]:
    """Begin and end along the first dim."""
    return (box.offset[0], box.offset[0] + box.size[0]) if box.size else (0, 1)


def copies(wanted: Box, stored: Boxes[B]) -> list[Copy[B]]:
    """What to copy from which of the stored boxes of the same tensor; ValueError for a gap.

    Stored boxes must not overlap: elements are counted.
    """
    found = list(stored.meeting(wanted))
    there = sum(copy.part.numel for copy in found)
    if there != wanted.numel:
        raise ValueError(
            f"{there} of {wanted.numel} elements of offset {wanted.offset}, size {wanted.size}"
        )
    return found
