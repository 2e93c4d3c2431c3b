"""Stages that sleep instead of computing, run by our executor and by torch.distributed.pipelining.

One rank of pipeline.py. Sleeping takes no core, so two cores are enough for four ranks, and what is
measured beyond the given times is the executor's own work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from megatron_lite.layers.deferred import Deferred, WeightGradients
from megatron_lite.mpu.grid import Grid
from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.pipeline.actions import Action, Schedule
from megatron_lite.pipeline.executor import PipelineExecutor, Program, Root
from megatron_lite.pipeline.p2p import connect
from megatron_lite.pipeline.plan import SchedulePlan

SHAPE = (128, 128)
"""Of what stages exchange: 64 kB in float32."""
TORCH = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}
"""torch's class for a schedule."""
ONLY_TORCHS = ("interleaved-zero-bubble",)
"""Schedules of which we have no generator: our executor runs torch's own table."""


@dataclass(frozen=True)
class Milliseconds:
    """Of one micro-batch on one rank, all of its stages together."""

    forward: float = 10.0
    backward: float = 20.0
    weight: float = 10.0
    """The part of the backward that a split puts off."""

    def of_stage(self, stages_a_rank: int) -> Milliseconds:
        """The same for one of several stages."""
        return Milliseconds(
            *(t / stages_a_rank for t in (self.forward, self.backward, self.weight))
        )


class Clock:
    """Of one micro-batch on one stage: its forward and backward take their time from here,
    whatever part of it goes into code."""

    def __init__(self, times: Milliseconds) -> None:
        self.times = times
        self.start()

    def start(self) -> None:
        """A forward, a backward or a half of one begins."""
        self.due, self.runs = perf_counter(), True

    def spend(self, milliseconds: float, *, last: bool) -> None:
        """Wait until so much more than before has passed since the start."""
        if not self.runs:
            self.start()
        self.due, self.runs = self.due + milliseconds / 1000, not last
        time.sleep(max(0.0, self.due - perf_counter()))


class _Output(Function):
    """The end of a forward, and the start of a backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        y = y.clone()
        clock.spend(clock.times.forward, last=True)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock.start()
        return grad, None


class _Input(Function):
    """The end of a backward: of all of it, or of its first half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad, times = grad.clone(), ctx.clock.times
        ctx.clock.spend(times.backward - times.weight, last=True)
        return grad, None


class _Weight(Function):
    """Takes as long as the weight's gradient, now or when a split backward gets to it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, clock: Clock, later: WeightGradients | None) -> Tensor:
        ctx.clock, ctx.later, ctx.parameter = clock, later, weight
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        def compute() -> Tensor:
            result = grad.expand_as(ctx.parameter).clone()
            ctx.clock.spend(ctx.clock.times.weight, last=False)
            return result

        if ctx.later is None or not ctx.later.are_deferred:
            return compute(), None, None
        ctx.later.leave(ctx.parameter, compute)
        return None, None, None


class SleepingStage(nn.Module):
    """A stage for both executors."""

    def __init__(self, times: Milliseconds, later: WeightGradients | None = None) -> None:
        super().__init__()
        self.times, self.later = times, later
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        clock = Clock(self.times)
        y = _Input.apply(x, clock)
        return _Output.apply(y + _Weight.apply(self.weight, clock, self.later), clock)


class Sleeping:
    """Our executor's view of the stages; the loss is a mean."""

    def __init__(self, stages: dict[int, SleepingStage], last: int, later: WeightGradients) -> None:
        self.stages, self.last, self.later = stages, last, later
        self.seconds = 0.0
        """What the stages took so far."""

    def forward(self, stage: int, batch: Tensor, hidden: Tensor | None) -> Tensor:
        with self._timed():
            x = batch.detach().requires_grad_() if hidden is None else hidden
            y = self.stages[stage](x)
            return y.mean() if stage == self.last else y

    def backward(self, output: Root, gradient: Tensor) -> None:
        with self._timed():
            torch.autograd.backward(output, gradient)

    def backward_input(self, output: Root, gradient: Tensor) -> list[Deferred]:
        with self._timed():
            return self.later.put_off(output, gradient)

    def backward_weight(self, waiting: list[Deferred]) -> None:
        with self._timed():
            for deferred in waiting:
                deferred.compute()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = perf_counter()
        yield
        self.seconds += perf_counter() - begun


def ours(
    table: Schedule, times: Milliseconds, groups: ProcessGroups
) -> tuple[PipelineExecutor, Sleeping, Callable[[], None]]:
    """Our executor, what it runs, and a step by it."""
    later = WeightGradients()
    rank = groups.pipeline.rank
    held = {stage for _, stage in table.held_by(rank)}
    stages = {stage: SleepingStage(times, later) for stage in held}
    compute = Sleeping(stages, table.num_stages - 1, later)
    device = torch.device("cpu")
    executor = PipelineExecutor(groups, compute, dtype=torch.float32, device=device)
    connect(groups, device, SchedulePlan(table.name, table).neighbours)
    program = Program(table, rank)
    batches = list(torch.zeros(table.num_microbatches, *SHAPE))

    def step() -> None:
        executor.run(program, batches, hidden_shape=SHAPE, loss_gradient=torch.ones(()))

    return executor, compute, step


def torchs(name: str, count: int, times: Milliseconds, placement: list[int]) -> Any:
    """torch's schedule with its stages; `placement` are the ranks of the stages."""
    rank, device = dist.get_rank(), torch.device("cpu")
    stages = [
        pipelining.PipelineStage(SleepingStage(times), stage, len(placement), device)
        for stage, home in enumerate(placement)
        if home == rank
    ]
    single = name in ("gpipe", "1f1b")
    schedule: Any = TORCH[name]
    return schedule(
        stages[0] if single else stages, count, loss_fn=lambda y, _: y.mean(), scale_grads=False
    )


def torch_step(schedule: Any, count: int, *, first: bool, last: bool) -> Callable[[], None]:
    """A step by torch's executor on this rank."""
    batch = torch.zeros(count * SHAPE[0], *SHAPE[1:], requires_grad=True)

    def step() -> None:
        inputs = (batch,) if first else ()
        if last:
            schedule.step(*inputs, target=batch.detach(), losses=[], return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)

    return step


def table_of(schedule: Any, name: str, placement: list[int], count: int) -> Schedule:
    """torch's own table as one of ours; a whole backward is a B with its W behind it."""
    rows = []
    for rank in range(max(placement) + 1):
        row: list[Action] = []
        for action in schedule.pipeline_order[rank]:
            if action is None:
                continue
            kind = {"F": "F", "I": "B", "B": "BW", "W": "W"}[action.computation_type.value]
            row += [Action(k, action.stage_index, action.microbatch_index) for k in kind]  # type: ignore[arg-type]
        rows.append(row)
    return Schedule.one_way(
        name, placement=placement, num_microbatches=count, actions=rows, split_backward=True
    )


def groups_of(ranks: int) -> ProcessGroups:
    """One pipeline of all ranks."""
    return ProcessGroups.create(Grid(pp_size=ranks, rank=dist.get_rank()))
