"""What is measured of weights and gradients for the log, each logical element counted once.

Reads what engines hand out as fragments, of which every element has one owner among the
data-parallel ranks and one counted holder among the others; so the sums are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint.fragment import Fragment
from megatron_lite.config.schema import LoggingConfig
from megatron_lite.engine.interface import Engine
from megatron_lite.monitoring.histograms import Histogram


@dataclass(frozen=True)
class Measured:
    """The results of one step; None or empty where they were not asked for."""

    params_norm: float | None = None
    num_zeros: int | None = None
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Of the master weights, by tag."""


class Measures:
    """One rank's part; every method is called by all ranks together."""

    def __init__(self, config: LoggingConfig, engine: Engine, device: torch.device) -> None:
        self._config, self._engine, self._device = config, engine, device
        self._zeros: int | None = None

    def watch(self, *, logged: bool) -> None:
        """Before a step: look at its gradients if it will be logged and that is asked for."""
        self._zeros = None
        wanted = logged and self._config.log_num_zeros_in_grad
        self._engine.on_gradients = self._count if wanted else None

    def _count(self, gradients: Iterable[Fragment]) -> None:
        zeros = torch.zeros((), dtype=torch.int64, device=self._device)
        for _, values in counted(gradients, "grad"):
            zeros += values.numel() - torch.count_nonzero(values).to(self._device)
        dist.all_reduce(zeros)
        self._zeros = int(zeros)

    def take(self, iteration: int) -> Measured:
        """After a step that is logged."""
        interval = self._config.log_histograms_interval
        with_histograms = interval > 0 and iteration % interval == 0
        return Measured(
            params_norm=self._params_norm() if self._config.log_params_norm else None,
            num_zeros=self._zeros,
            histograms=self._histograms() if with_histograms else {},
        )

    def _params_norm(self) -> float:
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for _, values in counted(self._engine.fragments(), "fp32"):
            norm = torch.linalg.vector_norm(values, dtype=torch.float64)
            squares += norm.square().to(self._device)
        dist.all_reduce(squares)
        return float(squares.sqrt())

    @cached_property
    def _parts(self) -> list[str]:
        """Names of the parts of the whole model, the same on every rank."""
        own = {part_of(name) for name, _ in counted(self._engine.fragments(), "fp32")}
        everyones: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(everyones, own)
        return sorted(set().union(*everyones))

    def _histograms(self) -> dict[str, Histogram]:
        found = {part: Histogram.empty(self._device) for part in self._parts}
        for name, values in counted(self._engine.fragments(), "fp32"):
            found[part_of(name)].add(values)
        for histogram in found.values():
            dist.all_reduce(histogram.counts)
            dist.all_reduce(histogram.sums)
            dist.all_reduce(histogram.extremes, op=dist.ReduceOp.MAX)
        # A diverged model can have a layer without a finite weight.
        return {f"weights/{part}": h for part, h in found.items() if h.sums[0] > 0}


def counted(fragments: Iterable[Fragment], state: str) -> Iterator[tuple[str, Tensor]]:
    """Name and values of the pieces of logical tensors that this rank counts; no padding."""
    for fragment in fragments:
        if not fragment.placement.counted:
            continue
        for piece in fragment.pieces:
            yield piece.tensor, fragment.view(state, piece)


def part_of(name: str) -> str:
    """The part of the model that a logical tensor belongs to: `layers.17`, or its first word."""
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "layers" else 1])
