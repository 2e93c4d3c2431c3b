"""Do tensors that should be the same bits hold the same bits? A hash on the device, and a verdict.

Which ranks should hold the same is replica_check.py's business. (A checkpoint's fingerprints do not
depend on how a tensor is cut, which costs more; copies are cut alike.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that are hashed at once, by device: what stays in a core's cache, few calls."""
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd, as are all weights: with odd factors mod 2⁶⁴ no change of a single element is lost."""


def content_hash(values: Tensor) -> Tensor:
    """Hash of a tensor's bits in their order: int64, 0-dim, on its device; no host read.

    Σ bits(i) · weight(i) mod 2⁶⁴ of each block, blocks joined as the digits of a number.
    """
    bits = values.detach().contiguous().flatten().view(_INTEGERS[values.element_size()])
    size = _BLOCK[values.device.type]
    weights = _weights(min(size, bits.numel()), values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for block in bits.split(size):
        total = total * _FACTOR + (block.to(torch.int64) * weights[: block.numel()]).sum()
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """An odd number for each place (a multiplicative hash, folded once; int64 wraps around)."""
    place = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _FACTOR
    return ((place ^ (place >> 29)) * (0x94D049BB133111EB - (1 << 64))) | 1


@dataclass(frozen=True)
class Drift:
    """A tensor that some of its holders hold differently."""

    tensor: str
    agreeing: tuple[int, ...]
    """Ranks of the majority; empty where there is none, so that nothing tells who is right."""
    others: tuple[int, ...]

    def describe(self, nodes: Mapping[int, str]) -> str:
        """In words, with the nodes that the ranks run on."""
        where = ", ".join(f"{rank} on {nodes[rank]}" for rank in self.others)
        if not self.agreeing:
            return f"{self.tensor}: ranks {where} hold different values, none of them a majority"
        same = ", ".join(map(str, self.agreeing))
        rank, holds = ("rank", "holds") if len(self.others) == 1 else ("ranks", "hold")
        return f"{self.tensor}: {rank} {where} {holds} another value than rank {same}"


def drift(tensor: str, hashes: Mapping[int, int]) -> Drift | None:
    """The verdict on what each rank holds of a tensor; None where all agree.

    >>> drift("norm.weight", {0: 7, 1: 7, 2: 8})
    Drift(tensor='norm.weight', agreeing=(0, 1), others=(2,))
    """
    by_value: dict[int, list[int]] = {}
    for rank, value in sorted(hashes.items()):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return None
    largest: Sequence[int] = max(by_value.values(), key=len)
    if 2 * len(largest) <= len(hashes):
        largest = ()
    return Drift(tensor, tuple(largest), tuple(rank for rank in hashes if rank not in largest))
