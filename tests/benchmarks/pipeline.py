"""Speed of the pipeline executor: measured bubbles beside simulated ones, and beside torch's.

`python tests/benchmarks/pipeline.py [--quick] [--schedules …] [--micro-batches 8 16]`. Four ranks
whose stages sleep (10 ms forward, 20 ms backward, of which 10 ms are weight gradients) run each
schedule by our executor and by torch.distributed.pipelining in turn, step by step. The simulator is
asked twice: with messages that take no time, and with the time that they took here.
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
    Sleeping,
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
    with_messages: float
    """The same where a message takes `message_ms`."""
    message_ms: float
    """Measured in this run, see message_time."""
    measured_bubble: float
    """Share of a step in which a rank's stages compute nothing: it waits, or the executor works.
    The median over the steps."""
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
        f"{'ratio':>6} {'bubble':>7} {'simulated':>9} {'and messages':>12}"
    )
    for r in results:
        torchs = "       -      -" if r.ratio is None else f"{r.torchs:8.1f} {r.ratio:6.3f}"
        print(
            f"{r.schedule:24} {r.micro_batches:3} {r.ideal:9.1f} {r.ours:8.1f} "
            f"{r.ours / r.ideal:7.3f} {torchs} {r.measured_bubble:7.3f} {r.simulated_bubble:9.3f} "
            f"{r.with_messages:12.3f}"
        )
    print(f"a message took {results[0].message_ms:.2f} ms, its work on both ranks included")
    print(json.dumps(summary(results, quick=args.quick)))
    return 0


def summary(results: list[Measured], *, quick: bool) -> dict[str, Any]:
    """The facts by schedule, of the largest number of micro-batches, and all rows."""
    last = {r.schedule: r for r in results}
    return {
        "bubble": {
            name: {
                "measured": r.measured_bubble,
                "simulated": r.simulated_bubble,
                "with_messages": r.with_messages,
            }
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
    message = message_time(groups, repetitions)
    results = [measure(n, m, groups, repetitions, message) for n in schedules for m in counts]
    if rank == 0:
        answers.put(results)
    dist.barrier()
    dist.destroy_process_group()


def message_time(groups: ProcessGroups, repetitions: int) -> float:
    """Milliseconds from the end of an action to the start of the one that waits for its result.

    Of one micro-batch, on which the ranks work one after the other: what the step takes beyond the
    stages is its 2 (RANKS - 1) messages, with the executor's work around each.
    """
    table = SchedulePlan.of("1f1b", num_ranks=RANKS, num_microbatches=1).sample
    _, compute, step = ours(table, Milliseconds(), groups)
    alternate([step], WARM_UP)
    ((seconds, busy),) = alternate([step], repetitions, compute)
    beyond = [taken - spent for taken, spent in zip(seconds, busy, strict=True)]
    return 1000 * median(beyond) / (2 * (RANKS - 1))


def measure(
    name: str, count: int, groups: ProcessGroups, repetitions: int, message: float
) -> Measured:
    """One schedule, by us and by torch in turn; `message` is a message's time in milliseconds."""
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
    (seconds, busy), *others = alternate(steps, repetitions, compute)
    bubbles = [1 - spent / (RANKS * taken) for taken, spent in zip(seconds, busy, strict=True)]
    timeline = simulated(table, times)
    peaks: list[Any] = [None] * RANKS
    dist.all_gather_object(peaks, executor.peak_activations)
    return Measured(
        schedule=name,
        micro_batches=count,
        ideal=timeline.makespan,
        ours=1000 * median(seconds),
        torchs=1000 * median(others[0][0]) if others else None,
        simulated_bubble=timeline.bubble_fraction,
        with_messages=simulated(table, times, message).bubble_fraction,
        message_ms=message,
        measured_bubble=median(bubbles),
        peak_activations=peaks,
    )


def alternate(
    steps: list[Callable[[], None]], repetitions: int, compute: Sleeping | None = None
) -> list[tuple[list[float], list[float]]]:
    """For each of `steps`, which take turns: seconds on the slowest rank, one for each repetition,
    and what `compute` spent in stages meanwhile, all ranks together."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in steps]
    for _ in range(repetitions):
        for step, (seconds, busy) in zip(steps, found, strict=True):
            dist.barrier()
            before = compute.seconds if compute else 0.0
            started = perf_counter()
            step()
            taken = torch.tensor(perf_counter() - started, dtype=torch.float64)
            spent = torch.tensor(compute.seconds - before if compute else 0.0, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            seconds.append(float(taken))
            busy.append(float(spent))
    return found


def simulated(table: Schedule, times: Milliseconds, message: float = 0.0) -> Timeline:
    """What the simulator says of the same times, in milliseconds."""
    durations: dict[Kind, float] = {"F": times.forward, "B": times.backward}
    if table.split_backward:
        durations |= {"B": times.backward - times.weight, "W": times.weight}
    return simulate(table, durations=durations, p2p_time=message)


if __name__ == "__main__":
    raise SystemExit(main())
