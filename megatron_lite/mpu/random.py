"""RngStreams: named streams of random numbers over one device's default generator.

Outside sharded regions the ranks of a tensor group must drop the same elements, inside them
different ones. torch's dropout and attention draw from the default generator only, so a stream is
a saved state of it that is swapped in while the stream is in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor

from megatron_lite.mpu.grid import Grid

REPLICATED = "replicated"
"""The stream of regions that every tensor-parallel rank computes alike: the default generator."""
SHARDED = "sharded"
"""The stream of regions in which tensor-parallel ranks hold different elements."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any mix of numbers and names; unrelated inputs give unrelated streams."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RngStreams:
    """The streams of one rank. `REPLICATED` is the default generator itself while none is used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[str, Tensor] = {}

    def seed(self, seed: int, grid: Grid) -> None:
        """Start both streams: each data-parallel and pipeline rank has its own pair."""
        place = (grid.dp_rank, grid.pp_rank)
        torch.manual_seed(derive_seed(seed, SHARDED, *place, grid.tp_rank))
        self._states = {SHARDED: self._get()}
        torch.manual_seed(derive_seed(seed, REPLICATED, *place))

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Draw from stream `name` inside the block and go on there the next time."""
        if name == REPLICATED:
            yield
            return
        outer = self._get()
        self._set(self._states[name])
        try:
            yield
        finally:
            self._states[name] = self._get()
            self._set(outer)

    @contextmanager
    def replay(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Draw again what was drawn after `states` was taken, then go on as if nothing was."""
        now = self.states()
        self.restore(states)
        try:
            yield
        finally:
            self.restore(now)

    def states(self) -> dict[str, Tensor]:
        """All streams, as uint8 tensors; what a checkpoint keeps."""
        return {REPLICATED: self._get(), **{k: v.clone() for k, v in self._states.items()}}

    def fit(self, states: Mapping[str, Tensor]) -> bool:
        """Whether `restore` could continue from these: another kind of device has other states."""
        own = {name: state.shape for name, state in self.states().items()}
        return own == {name: state.shape for name, state in states.items()}

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Continue from what `states` returned."""
        others = dict(states)
        self._set(others.pop(REPLICATED))
        self._states = others

    def _get(self) -> Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)
