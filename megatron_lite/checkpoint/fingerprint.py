"""A hash of a logical tensor that does not depend on how it is cut: the proof of a resharding.

It is Σ bits(i) · weight(i) mod 2⁶⁴ over all elements, where an element's weight is the product of
one pseudo-random odd number for each of its coordinates. A sum over elements is the sum over any
boxes of them, so every box is read once, where it lies, and nothing is put together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_lite.checkpoint.tensor_file import Values
from megatron_lite.sharding.placement import Box

_MASK = (1 << 64) - 1
_BLOCK_BYTES = 1 << 18
"""Rows are multiplied a few at a time, so that the 64-bit products stay in the cache."""

Words = npt.NDArray[np.uint64]


def box_fingerprint(values: Values, box: Box) -> int:
    """The part of a tensor's fingerprint that `values`, its elements in `box`, contribute.

    Equal bits give equal fingerprints; −0 and 0, or two NaNs of other bits, don't.
    """
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}").reshape(box.size)
    weights = [_weights(d, o, n) for d, (o, n) in enumerate(zip(box.offset, box.size, strict=True))]
    while len(weights) > 2:  # the leading dims become rows of a matrix
        lead = np.multiply.outer(weights[0], weights[1]).ravel()
        bits, weights = bits.reshape(-1, *bits.shape[2:]), [lead, *weights[2:]]
    if not weights:
        return int(bits)
    columns = weights[-1]
    sums = bits if len(weights) == 1 else _weighted_rows(bits, weights[0])
    return int((sums * columns).sum(dtype=np.uint64))


def _weighted_rows(bits: Values, weights: Words) -> Words:
    """Σ over rows of row × its weight, [columns]."""
    rows, columns = bits.shape
    step = max(1, _BLOCK_BYTES // (8 * columns))
    products = np.empty((min(step, rows), columns), dtype=np.uint64)
    total = np.zeros(columns, dtype=np.uint64)
    for first in range(0, rows, step):
        part = bits[first : first + step]
        out = products[: len(part)]
        np.multiply(part, weights[first : first + step, None], out=out)
        total += out.sum(axis=0)
    return total


def _weights(dim: int, first: int, count: int) -> Words:
    """An odd number for each coordinate of a dimension (the finaliser of splitmix64)."""
    word = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    word *= np.uint64(0x9E3779B97F4A7C15)
    word ^= np.uint64((0xD1B54A32D192ED03 * (dim + 1)) & _MASK)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (word ^ (word >> np.uint64(31))) | np.uint64(1)


class Fingerprints:
    """Fingerprints of the states of many logical tensors, added up box by box."""

    def __init__(self, sums: Mapping[tuple[str, str], int] | None = None) -> None:
        self.sums = dict(sums or {})
        """By (tensor, state)."""

    def add(self, tensor: str, state: str, value: int) -> None:
        """Count one box's fingerprint in."""
        key = (tensor, state)
        self.sums[key] = (self.sums.get(key, 0) + value) & _MASK

    def update(self, other: Fingerprints) -> None:
        """Count all boxes of another part of the same tensors in."""
        for (tensor, state), value in other.sums.items():
            self.add(tensor, state, value)

    def lines(self) -> list[str]:
        """`<16 hex digits> <tensor> <state>`, sorted by tensor and state."""
        return [f"{value:016x} {t} {s}" for (t, s), value in sorted(self.sums.items())]

    def total(self) -> str:
        """One hash over all lines, 32 hex digits."""
        return xxhash.xxh3_128("\n".join(self.lines()).encode()).hexdigest()

    def differing(self, other: Fingerprints) -> list[tuple[str, str]]:
        """(tensor, state) pairs whose fingerprints differ or that one side lacks, sorted."""
        keys = self.sums.keys() | other.sums.keys()
        return sorted(k for k in keys if self.sums.get(k) != other.sums.get(k))
