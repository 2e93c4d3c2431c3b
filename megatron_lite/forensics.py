"""Forensics: a step that was not finite is run again, and everything in it looked at.

Such a step changed no weight, and the random streams are put back to where it began, so it is the
same step; normal steps pay nothing. All ranks take part. Called by guard.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.data.loader import MicroBatch
from megatron_lite.data.provenance import origins
from megatron_lite.data.training_order import TrainingOrder
from megatron_lite.engine.interface import Engine
from megatron_lite.findings import Seen, finding_facts, irreproducible, write_facts
from megatron_lite.layers.context import placement_of
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.random import RngStreams
from megatron_lite.numerics.nonfinite import Finding, Watch
from megatron_lite.pipeline.executor import Compute

_LAYER = re.compile(r"layers\.(\d+)")
_TOLD = 4
"""Micro-batches of which a rank tells the first finding; of the others it tells the number."""
Run = Callable[[list[MicroBatch], Compute | None], tuple[list[Tensor], Tensor]]
"""Runs micro-batches through the schedule, with the given work behind its actions or the usual one;
returns the loss sums (on the last stage) and all replicas' tokens."""


@dataclass(frozen=True)
class Taken:
    """What one training step was made of."""

    iteration: int
    first_sample: int
    """Number of its first sample in the run."""
    end_sample: int
    """That behind its last."""
    batches: list[MicroBatch]
    """This rank's micro-batches, on the device."""
    losses_of: Sequence[int]
    """Numbers of those whose losses this rank has, in the order of its losses."""
    random: Mapping[str, Tensor]
    """The random streams before it."""
    loss_scale: float
    order: TrainingOrder
    run: Run


@dataclass(frozen=True)
class Report:
    """What is known of a bad step."""

    story: str
    file: str | None
    """Where all of it is written; None where that failed."""


@dataclass
class Forensics:
    """One rank's part in looking for what went wrong first."""

    groups: ProcessGroups
    engine: Engine
    streams: RngStreams
    folder: Path
    micro_batch_size: int
    node: str

    def investigate(self, taken: Taken, losses: list[Tensor], facts: Mapping[str, Any]) -> Report:
        """Run a step again that changed nothing and tell what in it was not finite first.

        `losses` are what it gave on this rank, `facts` are written down with the rest. Collective;
        the same report on all ranks.
        """
        pairs = zip(taken.losses_of, losses, strict=True)
        bad = [number for number, loss in pairs if not bool(torch.isfinite(loss))]
        found = sorted(self._replay(taken), key=lambda finding: finding.order)
        numbers = [one.micro_batch for one in found if one.micro_batch is not None]
        own = Seen(self.node, found[:_TOLD], numbers, bad)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, own)
        firsts = [
            self._facts(taken, everyones[rank].node, rank, finding)
            for rank, finding in self._firsts(everyones)
        ]
        facts = {"iteration": taken.iteration, **facts, "reproduced": bool(firsts)}
        facts["samples"] = [taken.first_sample, taken.end_sample]
        facts["findings"] = firsts
        facts["micro_batches_not_finite"] = self._micro_batches(everyones)
        facts["losses_not_finite"] = {
            f"rank {rank}": seen.bad_losses
            for rank, seen in enumerate(everyones)
            if seen.bad_losses
        }
        told = [write_facts(self.folder, taken.iteration, facts) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(told)
        story = _story(facts) if firsts else irreproducible(everyones)
        return Report(story, told[0])

    def _replay(self, taken: Taken) -> list[Finding]:
        """Take the step again without its update; returns what this rank found."""
        working = list(self.engine.working())
        watch = Watch(
            {stage: logical_modules(module) for stage, module in self.engine.modules().items()},
            [(_name(weights.parameter), weights.parameter) for weights in working],
            batches=taken.batches,
            compute=self.engine,
        )
        # Compiled layers would run without the hooks.
        with self.streams.replay(taken.random), watch, torch.compiler.set_stance("force_eager"):
            for weights in working:
                watch.weight(_name(weights.parameter), weights.values)
            self.engine.begin_step(len(taken.batches), diagnose=True)
            taken.run(taken.batches, watch)
            self.engine.give_up_step()
        summed = self.engine.nonfinite_parameter()
        if summed is not None and not watch.found:
            watch.summed(summed)
        return list(watch.found.values())

    def _firsts(self, everyones: list[Seen]) -> list[tuple[int, Finding]]:
        """Rank and finding that came first in each micro-batch of each replica, in their order."""
        replica = [self.groups.grid.at(rank).dp_rank for rank in range(len(everyones))]
        found = [(rank, one) for rank, seen in enumerate(everyones) for one in seen.found]
        # Replicas know nothing of each other: of two alike the lower one comes first.
        found.sort(key=lambda pair: (pair[1].order, replica[pair[0]], pair[0]))
        firsts: dict[tuple[int, int | None], tuple[int, Finding]] = {}
        for rank, finding in found:
            firsts.setdefault((replica[rank], finding.micro_batch), (rank, finding))
        return list(firsts.values())

    def _micro_batches(self, everyones: list[Seen]) -> dict[str, list[int]]:
        """By replica the numbers of all micro-batches in which something was not finite."""
        found: dict[str, set[int]] = {}
        for rank, seen in enumerate(everyones):
            replica = f"replica {self.groups.grid.at(rank).dp_rank}"
            found.setdefault(replica, set()).update(seen.micro_batches)
        return {replica: sorted(numbers) for replica, numbers in found.items() if numbers}

    def _facts(self, taken: Taken, node: str, rank: int, finding: Finding) -> dict[str, Any]:
        grid, number, samples = self.groups.grid.at(rank), finding.micro_batch, None
        if number is not None:
            samples = origins(
                taken.order,
                taken.first_sample,
                micro_batch=number,
                micro_batch_size=self.micro_batch_size,
                dp_rank=grid.dp_rank,
                dp=grid.dp_size,
            )
        layer = _LAYER.match(finding.name)
        return finding_facts(
            finding, grid, node, layer=None if layer is None else int(layer[1]), samples=samples
        )


def logical_modules(stage: nn.Module) -> dict[str, nn.Module]:
    """The modules of a stage by name, its layers by their number in the whole model."""
    shift = 0
    for path, parameter in stage.named_parameters():
        logical = next(iter(placement_of(parameter).names), "")
        here, there = _LAYER.match(path), _LAYER.match(logical)
        if here is not None and there is not None:
            shift = int(there[1]) - int(here[1])
            break
    return {
        _LAYER.sub(lambda layer: f"layers.{int(layer[1]) + shift}", path, count=1): module
        for path, module in stage.named_modules()
    }


def _name(parameter: nn.Parameter) -> str:
    return ", ".join(placement_of(parameter).names) or "padding of a vocabulary"


def _story(facts: Mapping[str, Any]) -> str:
    """The first finding, where its data came from, and how much else is bad."""
    first = facts["findings"][0]
    story = f"{first['text']} (node {first['node']})"
    if first["samples"]:
        story += f". Its micro-batch is {'; '.join(sample['text'] for sample in first['samples'])}"
    numbers = facts["micro_batches_not_finite"]
    if (total := sum(map(len, numbers.values()))) > 1:
        story += f". In all {total} micro-batches are not finite"
    return story
