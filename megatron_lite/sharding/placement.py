"""Box, Segment, Placement: local parameter rows ↔ boxes of logical tensors. Pure integers.

A layer attaches a Placement to every parameter that it creates. Initialisation draws from it, the
engine counts norms by it, checkpoints are written and read by it. Nothing here knows a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: `offset[d] ≤ index[d] < offset[d] + size[d]`."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a box without dims."""
        return prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor, or None where they share no element."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Index expression of this box in an array whose first element lies at `origin`."""
        base = origin if origin is not None else (0,) * len(self.offset)
        return tuple(
            slice(o - b, o - b + n) for o, n, b in zip(self.offset, self.size, base, strict=True)
        )


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism divides a logical tensor, whatever its size: into equal shards of
    `length` along `dim`. Length is that with padding; the tensor's own may be shorter."""

    dim: int
    length: int


@dataclass(frozen=True)
class Segment:
    """Rows `[row, row + box.size[0])` of a local parameter hold `box` of the logical tensor.

    `cut` is None where every tensor-parallel rank holds the whole tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    box: Box
    row: int
    cut: Cut | None = None


@dataclass(frozen=True)
class Piece:
    """A stretch of a local parameter that is contiguous in memory and a box of one tensor."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    start: int
    """Flat position of the piece's first element in the local parameter."""
    cut: Cut | None


@dataclass(frozen=True)
class Placement:
    """Where the elements of one local parameter sit in the logical model.

    Rows that no segment covers are padding: they exist on one layout only, never in a checkpoint.
    """

    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    counted: bool = True
    """True on exactly one holder of each logical element among the ranks of a model replica: this
    holder enters gradient norms and writes checkpoints; the others hold copies."""
    tensor_sharded: bool = False
    """True where tensor-parallel ranks hold different elements, False where they hold copies."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the logical tensors of which this parameter holds a part."""
        return tuple(segment.tensor for segment in self.segments)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """The pieces of the flat range `[start, stop)` of the local parameter, in order.

        A range of a two-dimensional segment is at most three pieces: the rest of a first row,
        whole rows, and the beginning of a last row.
        """
        row_numel = prod(self.shape[1:])
        stop = prod(self.shape) if stop is None else stop
        for segment in self.segments:
            origin = segment.row * row_numel
            low = max(start, origin)
            high = min(stop, origin + segment.box.numel)
            if low >= high:
                continue
            at = low
            for part in flat_range_boxes(segment.box.size, low - origin, high - origin):
                offset = tuple(o + p for o, p in zip(segment.box.offset, part.offset, strict=True))
                yield Piece(segment.tensor, segment.shape, Box(offset, part.size), at, segment.cut)
                at += part.numel


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the flat range `[start, stop)` of a row-major array into contiguous boxes, in order.

    >>> [(b.offset, b.size) for b in flat_range_boxes((3, 4), 2, 9)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # the range lies inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        tail = tuple(shape[1:])
        yield Box((first,) + (0,) * len(tail), (last - first, *tail))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    if start >= prod(shape[1:]):
        return
    for box in flat_range_boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.size))


def replicated(name: str, shape: Sequence[int], *, rank: int) -> Placement:
    """A parameter of which every tensor-parallel rank holds a whole copy; rank 0's is counted."""
    shape = tuple(shape)
    segment = Segment(name, shape, Box((0,) * len(shape), shape), row=0)
    return Placement(shape, (segment,), counted=rank == 0)


def sharded(
    name: str, shape: Sequence[int], *, dim: int, rank: int, size: int, padded: int | None = None
) -> Placement:
    """Cut dimension `dim` of a logical tensor into `size` equal shards and take number `rank`.

    `padded` is the length of that dimension with padding (of a vocabulary); the logical tensor has
    none of it. Raises ValueError where the length does not divide by `size`.
    """
    shape = tuple(shape)
    length = shape[dim] if padded is None else padded
    if length % size:
        raise ValueError(f"{name}: dimension {dim} of length {length} can't be cut into {size}")
    cut = Cut(dim, length)
    box = shard_box(shape, cut, rank=rank, size=size)
    segments = (Segment(name, shape, box, row=0, cut=cut),) if box.numel else ()
    local = tuple(length // size if d == dim else n for d, n in enumerate(shape))
    return Placement(local, segments, tensor_sharded=size > 1)


def shard_box(shape: Sequence[int], cut: Cut | None, *, rank: int, size: int) -> Box:
    """The part of a logical tensor that tensor-parallel rank `rank` of `size` holds.

    Empty (a length of 0) for a rank whose rows are all padding.
    """
    shape = tuple(shape)
    if cut is None:
        return Box((0,) * len(shape), shape)
    width = cut.length // size
    low = min(rank * width, shape[cut.dim])
    held = min(low + width, shape[cut.dim]) - low
    offset = tuple(low if d == cut.dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(held if d == cut.dim else n for d, n in enumerate(shape)))


def stacked(*parts: Placement) -> Placement:
    """Fuse parameters along dimension 0 (query|key|value, gate|up) into one local parameter."""
    rows, segments = 0, []
    for part in parts:
        segments += [replace(segment, row=segment.row + rows) for segment in part.segments]
        rows += part.shape[0]
    return replace(parts[0], shape=(rows, *parts[0].shape[1:]), segments=tuple(segments))
