"""Forensics: a step that was not finite is run again, and everything in it looked at.

Such a step changed no weight, and the random streams are put back to where it began, so it is the
same step; normal steps pay nothing. All ranks take part. Called by guard.py.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.data.loader import MicroBatch
from megatron_lite.data.provenance import Origin, origins
from megatron_lite.data.training_order import TrainingOrder
from megatron_lite.engine.interface import Engine
from megatron_lite.health.nonfinite import Finding, Watch
from megatron_lite.layers.context import placement_of
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.mpu.random import RngStreams
from megatron_lite.pipeline.executor import PipelineExecutor

_LAYER = re.compile(r"layers\.(\d+)")
Run = Callable[[list[MicroBatch], PipelineExecutor | None], tuple[list[Tensor], Tensor]]
"""Runs micro-batches through the schedule, by the given executor or the usual one; returns the loss
sums (on the last stage) and all replicas' tokens."""


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
    random: Mapping[str, Tensor]
    """The random streams before it."""
    loss_scale: float
    order: TrainingOrder
    run: Run


@dataclass(frozen=True)
class Report:
    """What is known of a bad step."""

    story: str
    file: Path
    """Where all of it is written."""


@dataclass(frozen=True)
class _Seen:
    """What one rank found, and saw of the step itself."""

    node: str
    found: list[Finding]
    bad_losses: list[int]
    """Which of its losses, in the order of its forwards, were not finite."""


@dataclass
class Forensics:
    """One rank's part in looking for what went wrong first."""

    groups: ProcessGroups
    engine: Engine
    streams: RngStreams
    folder: Path
    micro_batch_size: int
    dtype: torch.dtype
    device: torch.device

    def investigate(self, taken: Taken, losses: list[Tensor], facts: Mapping[str, Any]) -> Report:
        """Run a step again that changed nothing and tell what in it was not finite first.

        `losses` are what it gave on this rank, `facts` are written down with the rest. Collective;
        the same report on all ranks.
        """
        bad = [i for i, loss in enumerate(losses) if not bool(torch.isfinite(loss))]
        own = _Seen(socket.gethostname(), self._replay(taken), bad)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, own)
        seen = dict(enumerate(everyones))
        found = sorted(
            ((rank, finding) for rank in seen for finding in seen[rank].found),
            # Replicas know nothing of each other: of two the lower one is named.
            key=lambda pair: (pair[1].order, self.groups.grid.at(pair[0]).dp_rank, pair[0]),
        )
        firsts = _first_of_each_micro_batch(found, self.groups)
        # Every rank knows the data, so all tell the same.
        facts = {"iteration": taken.iteration, **facts, "reproduced": bool(firsts)}
        facts["samples"] = [taken.first_sample, taken.end_sample]
        facts["findings"] = [self._facts(taken, seen[rank].node, rank, f) for rank, f in firsts]
        facts["losses_not_finite"] = {
            f"rank {r}": s.bad_losses for r, s in seen.items() if s.bad_losses
        }
        file = [self._write(taken.iteration, facts) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(file)
        assert file[0] is not None
        story = self._story(facts["findings"]) if firsts else _irreproducible(seen)
        return Report(story, file[0])

    def _replay(self, taken: Taken) -> list[Finding]:
        modules = {
            stage: logical_modules(module) for stage, module in self.engine.modules().items()
        }
        working = list(self.engine.working())
        watch = Watch(
            modules,
            [(_name(weights.parameter), weights.parameter) for weights in working],
            batches=taken.batches,
            forward=self.engine.forward,
            backward=self.engine.backward,
        )
        executor = PipelineExecutor(
            self.groups,
            forward=watch.forward,
            backward=watch.backward,
            dtype=self.dtype,
            device=self.device,
        )
        # Compiled layers would run without the hooks.
        with self.streams.replay(taken.random), watch, torch.compiler.set_stance("force_eager"):
            for weights in working:
                watch.weight(_name(weights.parameter), weights.values)
            self.engine.begin_step(len(taken.batches), diagnose=True)
            taken.run(taken.batches, executor)
            self.engine.give_up_step()
        summed = self.engine.nonfinite_parameter()
        if summed is not None and not watch.found:
            watch.summed(summed)
        return list(watch.found.values())

    def _facts(self, taken: Taken, node: str, rank: int, finding: Finding) -> dict[str, Any]:
        grid = self.groups.grid.at(rank)
        layer = _LAYER.match(finding.name)
        facts = {
            "rank": rank,
            "node": node,
            **{f"{axis}_rank": place for axis, place in grid.coordinates.items()},
            "phase": finding.phase,
            "micro_batch": finding.micro_batch,
            "stage": finding.stage,
            "layer": None if layer is None else int(layer[1]),
            "name": finding.name or f"stage {finding.stage}",
            "tensor": finding.tensor,
            "values": None if finding.values is None else asdict(finding.values),
            "text": _in_words(rank, finding),
        }
        if finding.micro_batch is None:
            return facts
        found = origins(
            taken.order,
            taken.first_sample,
            micro_batch=finding.micro_batch,
            micro_batch_size=self.micro_batch_size,
            dp_rank=grid.dp_rank,
            dp=grid.dp_size,
        )
        return facts | {"samples": [_origin_facts(origin) for origin in found]}

    def _story(self, findings: list[dict[str, Any]]) -> str:
        first, others = findings[0], len(findings) - 1
        story = f"{first['text']} (node {first['node']})"
        if samples := first.get("samples"):
            documents = "; ".join(sample["text"] for sample in samples)
            story += f". Its micro-batch is {documents}"
        if others:
            story += f". {others} more micro-batches or weights are not finite"
        return story

    def _write(self, iteration: int, facts: Mapping[str, Any]) -> Path:
        """Write what is known; an iteration that a rewind repeats keeps its earlier file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, again = self.folder / f"iteration_{iteration}.json", 1
        while path.exists():
            path, again = self.folder / f"iteration_{iteration}_{again}.json", again + 1
        path.write_text(json.dumps(_plain(facts), indent=1, allow_nan=False) + "\n")
        return path


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


def _first_of_each_micro_batch(
    found: list[tuple[int, Finding]], groups: ProcessGroups
) -> list[tuple[int, Finding]]:
    firsts: dict[tuple[int, int | None], tuple[int, Finding]] = {}
    for rank, finding in found:
        firsts.setdefault((groups.grid.at(rank).dp_rank, finding.micro_batch), (rank, finding))
    return list(firsts.values())


def _in_words(rank: int, finding: Finding) -> str:
    where = {
        "weight": "before the step",
        "forward": f"in the forward of micro-batch {finding.micro_batch}",
        "backward": f"in the backward of micro-batch {finding.micro_batch}",
        "sum": "as the sum over micro-batches, each of which is finite",
    }[finding.phase]
    name = finding.name or "the stage"
    values = "" if finding.values is None else f": {finding.values}"
    return f"rank {rank} (stage {finding.stage}): {name}, {finding.tensor} {where}{values}"


def _irreproducible(seen: Mapping[int, _Seen]) -> str:
    losses = [f"rank {r}: loss {s.bad_losses[0]}" for r, s in seen.items() if s.bad_losses]
    known = f" Not finite in the step itself: {'; '.join(losses)}." if losses else ""
    return (
        "run again, every value of every rank was finite: not reproducible, so perhaps a fault of "
        "hardware or communication, or a sum over data-parallel ranks beyond the number format."
        f"{known} Preflight tests of these nodes would tell more"
    )


def _origin_facts(origin: Origin) -> dict[str, Any]:
    return {
        "sample": origin.sample,
        "source": origin.source,
        "number": origin.number,
        "documents": [
            {"document": document, "first_token": offset, "tokens": length}
            for document, offset, length in origin.pieces
        ],
        "text": ", ".join(line.strip() for line in origin.lines()),
    }


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text, as in metrics.jsonl."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
