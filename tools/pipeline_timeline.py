"""Time a pipeline schedule and draw it: bubble, length of the step, activations that ranks keep."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_lite.command import run_tool
from megatron_lite.pipeline import picture, table_files
from megatron_lite.pipeline.actions import Schedule, ScheduleError
from megatron_lite.pipeline.chimera import chimera
from megatron_lite.pipeline.published import PUBLISHED
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule
from megatron_lite.pipeline.simulate import Timeline, Times, simulate_shares
from megatron_lite.pipeline.verify import verify

_EPILOG = """Times are those of one micro-batch on a rank's whole share of the model; a stage takes
its part of them where a rank holds several in one direction. Ranks start together, and a rank
computes on while it sends. Activations are counted in micro-batches of one stage; in 1F1B's unit
where a rank holds one stage, --json says them again."""

SHORTEST_MS, LONGEST_MS = 1e-9, 1e9
"""Times within these bounds can be summed and drawn without running out of a float's range."""
MOST_PARTS = 1_000_000
"""Stages x micro-batches: two or three actions each, which take minutes and a gigabyte or two."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EPILOG)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--schedule", choices=list(SCHEDULES), help="a schedule by name")
    what.add_argument(
        "--table", type=Path, metavar="FILE", help="a schedule of your own, .json or .csv"
    )
    what.add_argument(
        "--compare", action="store_true", help="all schedules in a Markdown table, with formulas"
    )
    parser.add_argument(
        "--stages", type=_size, metavar="P", help="pipeline ranks (pipeline_model_parallel_size)"
    )
    parser.add_argument(
        "--micro-batches", type=_size, nargs="+", metavar="M", help="of one replica and step"
    )
    parser.add_argument(
        "--virtual",
        type=_size,
        metavar="V",
        help="stages a rank, where the schedule leaves it open",
    )
    times = parser.add_argument_group("times (ms)")
    times.add_argument("--forward-ms", type=_milliseconds, default=10.0, metavar="MS")
    times.add_argument(
        "--backward-ms", type=_milliseconds, default=20.0, metavar="MS", help="the whole backward"
    )
    times.add_argument(
        "--weight-ms",
        type=_milliseconds,
        metavar="MS",
        help="the part of the backward that a split can defer (default: half)",
    )
    times.add_argument(
        "--p2p-ms", type=_milliseconds, default=0.0, metavar="MS", help="of a message"
    )
    parser.add_argument(
        "--live",
        type=_size,
        metavar="N",
        help="let Chimera keep N micro-batches alive (default: P)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    parser.add_argument(
        "--save-table", type=Path, metavar="FILE", help="write it as a table: .json or .csv"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args()
    if fault := _fault(options):
        parser.error(fault)
    return options


def _fault(options: argparse.Namespace) -> str | None:
    """Options that don't go together."""
    sizes = (options.stages, options.micro_batches)
    if options.table is not None and any(size is not None for size in (*sizes, options.virtual)):
        return "--stages, --micro-batches and --virtual are those of the table"
    if options.table is None and None in sizes:
        return "--stages and --micro-batches are needed"
    if not options.compare and len(options.micro_batches or [0]) > 1:
        return "several --micro-batches are for --compare"
    if options.compare and (options.json or options.plot or options.save_table):
        return "--compare prints a table and nothing else"
    if options.table is None and (fault := _too_large(options)):
        return fault
    if options.live is not None and options.schedule != "chimera":
        return "--live is for chimera; the others keep what their rule says"
    for path, what, suffixes in (
        (options.table, "table", table_files.SUFFIXES),
        (options.plot, "picture", picture.SUFFIXES),
        (options.save_table, "table", table_files.SUFFIXES),
    ):
        if path is not None and path.suffix not in suffixes:
            return f"{path}: a {what}'s name ends in {' or '.join(suffixes)}"
        if path is not None and not path.parent.is_dir():
            return f"{path}: there is no folder {path.parent}"
    return None


def _too_large(options: argparse.Namespace) -> str | None:
    """Sizes whose tables would be made for hours, until memory ends."""
    family = SCHEDULES.get(options.schedule)
    chunks = (family and family.chunks) or options.virtual or 2
    parts = options.stages * chunks * max(options.micro_batches)
    if parts <= MOST_PARTS:
        return None
    return (
        f"{options.stages} ranks with {chunks} stages and {max(options.micro_batches)} "
        f"micro-batches are {parts} parts to time; at most {MOST_PARTS} are"
    )


def _size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def _milliseconds(text: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if time != 0 and not SHORTEST_MS <= time <= LONGEST_MS:
        limits = f"ms from {SHORTEST_MS:g} to {LONGEST_MS:g}"
        raise argparse.ArgumentTypeError(f"{text} is no time: {limits}, or 0 for no time at all")
    return time


def main() -> None:
    """Print what was asked for."""
    options = _parse()
    if options.weight_ms is None:
        options.weight_ms = options.backward_ms / 2
    times = Times(options.forward_ms, options.backward_ms, options.weight_ms)
    if options.compare:
        print("\n".join(_comparison(options, times)))
        return
    schedule = _schedule(options, times)
    timeline = simulate_shares(schedule, times, p2p_time=options.p2p_ms)
    facts = _facts(schedule, timeline)
    if options.json:
        print(json.dumps(facts))
    else:
        print(_report(schedule, timeline, facts))
    if options.plot is not None:
        title = f"{schedule.name}: {timeline.makespan:g} ms, {timeline.bubble_fraction:.1%} idle"
        picture.save_picture(options.plot, schedule, timeline, title)
    if options.save_table is not None:
        as_csv = options.save_table.suffix == ".csv"
        write = table_files.table_as_csv if as_csv else table_files.table_as_json
        options.save_table.write_text(write(schedule), encoding="utf-8")


def _schedule(options: argparse.Namespace, times: Times) -> Schedule:
    if options.table is not None:
        return table_files.read_table(options.table)
    count = options.micro_batches[0]
    if options.live is not None:
        durations = times.durations(split_backward=False)
        return chimera(options.stages, count, durations=durations, live=options.live)
    return build_schedule(
        options.schedule,
        num_ranks=options.stages,
        num_microbatches=count,
        virtual=options.virtual,
        times=times,
    )


def _facts(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """What --json prints."""
    report = verify(schedule)
    busy = [sum(timed.end - timed.start for timed in row) for row in timeline.rows]
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_microbatches,
        "makespan_ms": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "idle_ms": [timeline.makespan - time for time in busy],
        "peak_live_activations": list(report.peak_activations),
        "peak_live_in_1f1b_units": [
            live * schedule.num_ranks / schedule.num_stages for live in report.peak_activations
        ],
        "peak_until_weights": list(report.peak_until_weights),
    }


def _report(schedule: Schedule, timeline: Timeline, facts: dict[str, Any]) -> str:
    lines = [
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages,"
        f" {schedule.num_microbatches} micro-batches",
        f"step {timeline.makespan:g} ms, bubble {timeline.bubble_fraction:.2%}",
        "",
        picture.as_text(schedule, timeline, columns=shutil.get_terminal_size((120, 24)).columns),
        "",
        "        idle ms   activations kept until B   until W",
    ]
    for rank in range(schedule.num_ranks):
        lines.append(
            f"rank {rank:<3}{facts['idle_ms'][rank]:>7g}"
            f"{facts['peak_live_activations'][rank]:>27}{facts['peak_until_weights'][rank]:>10}"
        )
    return "\n".join(lines)


def _comparison(options: argparse.Namespace, times: Times) -> list[str]:
    """A Markdown table: a row for each schedule, bubbles for each number of micro-batches."""
    counts = options.micro_batches
    head = ["schedule", "kept: published", "kept"]
    for count in counts:
        head += [f"{count}: published", f"{count}: simulated"]
    rows = [head, ["---"] * len(head)]
    for name, family in SCHEDULES.items():
        chunks = family.chunks or options.virtual or 2
        sizes = {"num_ranks": options.stages, "virtual": chunks}
        try:
            tables = [
                build_schedule(name, num_microbatches=count, times=times, **sizes)
                for count in counts
            ]
        except ScheduleError as reason:
            rows.append([name, str(reason), *[""] * (len(head) - 2)])
            continue
        bubbles = _bubbles(name, tables, chunks, times, options.p2p_ms)
        rows.append([name, *_kept(name, tables, chunks), *bubbles])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _kept(name: str, tables: list[Schedule], chunks: int) -> list[str]:
    """Published and found: the most that a rank keeps, in micro-batches of 1F1B's stage."""
    formulas, published, found = PUBLISHED[name], [], []
    for table in tables:
        sizes = (table.num_ranks, table.num_microbatches, chunks)
        fewest, most = formulas.fewest(*sizes) / chunks, formulas.most(*sizes) / chunks
        published.append(f"{most:g}" if fewest == most else f"{fewest:g} to {most:g}")
        found.append(f"{max(verify(table).peak_activations) / chunks:g}")
    return [" / ".join(dict.fromkeys(cells)) for cells in (published, found)]


def _bubbles(
    name: str, tables: list[Schedule], chunks: int, times: Times, p2p_ms: float
) -> list[str]:
    """Published, where messages take no time, and simulated."""
    cells = []
    for table in tables:
        sizes = (table.num_ranks, table.num_microbatches, chunks)
        cells.append(f"{PUBLISHED[name].bubble(*sizes, times):.1%}")
        cells.append(f"{simulate_shares(table, times, p2p_time=p2p_ms).bubble_fraction:.1%}")
    return cells


if __name__ == "__main__":
    sys.exit(run_tool(main, refused=ValueError))
