"""Speed of the pipeline executor: measured bubbles beside simulated ones, and beside torch's.

`python tests/benchmarks/pipeline.py [--quick] [--schedules …] [--micro-batches 8 16]`. Four ranks
whose stages sleep (10 ms forward, 20 ms backward, of which 10 ms are weight gradients) run each
schedule by our executor and by torch.distributed.pipelining in turn, step by step.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pipeline_work import (
    ONLY_TORCHS,
    TORCH,
    Milliseconds,
    groups_of,
    ours,
    table_of,
    torch_step,
    torchs,
)

from megatron_lite.mpu.groups import ProcessGroups
from megatron_lite.pipeline.actions import Kind, Schedule
from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.pipeline.simulate import Timeline, simulate

RANKS = 4
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "interleaved-zero-bubble",
    "chimera",
    "zb-h1",
    "zbv",
    "dualpipev",
)
STAGES_A_RANK = {"interleaved": 2, "interleaved-zero-bubble": 2, "zbv": 2, "dualpipev": 2}
WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """One schedule at one number of micro-batches; milliseconds a step, medians."""

    schedule: str
    micro_batches: int
    ideal: float
    """The simulator's makespan."""
    ours: float
    torchs: float | None
    simulated_bubble: float
    measured_bubble: float
    """Share of a step in which a rank's stages compute nothing: it waits, or the executor works."""
    peak_activations: list[int]
    """Measured, of each rank."""

    @property
    def ratio(self) -> float | None:
        """Our step over torch's."""
        return None if self.torchs is None else self.ours / self.torchs


def main(argv: list[str] | None = None) -> int:
    """Run; the last line of the output is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few micro-batches and repetitions")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--micro-batches", nargs="+", type=int)
    parser.add_argument("--repetitions", type=int, help="measured steps of each (default: 15)")
    args = parser.parse_args(argv)
    counts = args.micro_batches or ([4] if args.quick else [8, 16])
    repetitions = args.repetitions or (3 if args.quick else 15)
    results = run(args.schedules, counts, repetitions)
    print(
        f"{'schedule':24} {'m':>3} {'ideal ms':>9} {'ours':>8} {'/ideal':>7} {'torch':>8} "
        f"{'ratio':>6} {'bubble':>7} {'simulated':>9}"
    )
    for r in results:
        torchs = "       -      -" if r.ratio is None else f"{r.torchs:8.1f} {r.ratio:6.3f}"
        print(
            f"{r.schedule:24} {r.micro_batches:3} {r.ideal:9.1f} {r.ours:8.1f} "
            f"{r.ours / r.ideal:7.3f} {torchs} {r.measured_bubble:7.3f} {r.simulated_bubble:9.3f}"
        )
    print(json.dumps(summary(results, quick=args.quick)))
    return 0


def summary(results: list[Measured], *, quick: bool) -> dict[str, Any]:
    """The facts by schedule, of the largest number of micro-batches, and all rows."""
    last = {r.schedule: r for r in results}
    return {
        "bubble": {
            name: {"measured": r.measured_bubble, "simulated": r.simulated_bubble}
            for name, r in last.items()
        },
        "ratio_vs_torch": {n: r.ratio for n, r in last.items() if r.ratio is not None},
        "step_vs_ideal": {n: r.ours / r.ideal for n, r in last.items()},
        "quick": quick,
        "rows": [asdict(r) for r in results],
    }


def run(schedules: list[str], counts: list[int], repetitions: int) -> list[Measured]:
    """Measure on RANKS processes; each schedule at each number of micro-batches."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["pipeline_work"])  # torch is imported once
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), schedules, counts, repetitions, answers)
        mp.start_processes(_rank, arguments, nprocs=RANKS, start_method="forkserver")
        results: list[Measured] = answers.get()
    return results


def _rank(
    rank: int,
    store: str,
    schedules: list[str],
    counts: list[int],
    repetitions: int,
    answers: SimpleQueue[list[Measured]],
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a collection that looks through all that torch imported takes 30 ms
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    groups = groups_of(RANKS)
    results = [measure(n, m, groups, repetitions) for n in schedules for m in counts]
    if rank == 0:
        answers.put(results)
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, count: int, groups: ProcessGroups, repetitions: int) -> Measured:
    """One schedule, by us and by torch in turn."""
    virtual = STAGES_A_RANK.get(name, 1)
    times = Milliseconds().of_stage(virtual)
    theirs, table = None, None
    if name not in ONLY_TORCHS:
        table = SchedulePlan.of(
            name, num_ranks=RANKS, num_microbatches=count, virtual=virtual
        ).sample
        placement = list(table.placements[0])
    else:
        placement = [stage % RANKS for stage in range(RANKS * virtual)]
    if name in TORCH:
        theirs = torchs(name, count, times, placement)
    if table is None:
        table = table_of(theirs, name, placement, count)
    executor, compute, our_step = ours(table, times, groups)
    steps = [our_step]
    if theirs is not None:
        rank = groups.pipeline.rank
        steps.append(
            torch_step(theirs, count, first=placement[0] == rank, last=placement[-1] == rank)
        )
    alternate(steps, WARM_UP)
    compute.seconds = 0.0
    seconds = alternate(steps, repetitions)
    busy = torch.tensor(compute.seconds, dtype=torch.float64)
    dist.all_reduce(busy)
    timeline = simulated(table, times)
    peaks: list[Any] = [None] * RANKS
    dist.all_gather_object(peaks, executor.peak_activations)
    return Measured(
        schedule=name,
        micro_batches=count,
        ideal=timeline.makespan,
        ours=1000 * median(seconds[0]),
        torchs=1000 * median(seconds[1]) if theirs is not None else None,
        simulated_bubble=timeline.bubble_fraction,
        measured_bubble=1 - float(busy) / (RANKS * sum(seconds[0])),
        peak_activations=peaks,
    )


def alternate(steps: list[Callable[[], None]], repetitions: int) -> list[list[float]]:
    """Seconds of each step on the slowest rank; they take turns."""
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(repetitions):
        for number, step in enumerate(steps):
            dist.barrier()
            started = perf_counter()
            step()
            taken = torch.tensor(perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            seconds[number].append(float(taken))
    return seconds


def simulated(table: Schedule, times: Milliseconds) -> Timeline:
    """What the simulator says of the same times."""
    durations: dict[Kind, float] = {"F": times.forward, "B": times.backward}
    if table.split_backward:
        durations |= {"B": times.backward - times.weight, "W": times.weight}
    return simulate(table, durations=durations)


if __name__ == "__main__":
    raise SystemExit(main())
