"""Traces of a run that ends within the profiler's window: whole, and awaited by all ranks."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_lite.guard import TrainingStopped
from megatron_lite.trainer import Trainer
from tests.distributed.ranks import on_ranks
from tests.distributed.runs import make_trainer
from tests.distributed.small import layout, small_config

WINDOW = ["logging.profile=true", "logging.profile_step_start=1", "logging.profile_step_end=6"]
"""Iterations 3 to 6 are recorded."""
SLOW = 0.5
"""Seconds that rank 1 takes to begin its trace."""


@dataclass
class Seen:
    """What a rank saw of a run."""

    ended: str = ""
    traces_at_end: list[str] = field(default_factory=list)
    """Files that are there as the trainer lets go of this rank."""
    phases: list[str] = field(default_factory=list)
    """The heartbeat's, while the trace of rank 1 was written."""
    traces_at_7: list[str] = field(default_factory=list)
    """Files that are there as iteration 7 begins."""


def go_on(trainer: Trainer) -> None:
    """Nothing happens."""


def ask_rank_0(trainer: Trainer) -> None:
    """Rank 0 alone is asked to leave."""
    if dist.get_rank() == 0:
        trainer.stop.ask("a test")


def stop_all(trainer: Trainer) -> None:
    """All ranks agree that the run can't go on."""
    raise TrainingStopped("as planned")


def train_traced(
    config: Path, ranks: str, folder: Path, in_iteration_4: Callable[[Trainer], None]
) -> Seen:
    """Train; `in_iteration_4` acts at its end on every rank."""
    folder.mkdir(exist_ok=True)
    chosen = [*layout(1, 2), *WINDOW, f"logging.profile_ranks={ranks}"]
    trainer, seen = make_trainer(config, chosen, folder), Seen()
    step, write = trainer.iteration, trainer.profiler.write

    def iteration(total: int) -> None:
        if trainer.progress.iteration == 6:
            seen.traces_at_7 = names(folder)
        step(total)
        if trainer.progress.iteration == 4:
            in_iteration_4(trainer)

    def write_slowly() -> None:
        seen.phases.append(trainer.heartbeat.phase)
        if dist.get_rank() == 1:
            time.sleep(SLOW)
        write()

    trainer.iteration = iteration  # type: ignore[method-assign]
    trainer.profiler.write = write_slowly  # type: ignore[method-assign]
    try:
        seen.ended = trainer.fit()
    except TrainingStopped as stopped:
        seen.ended = str(stopped)
    seen.traces_at_end = names(folder)
    trainer.train_batches = iter(())
    trainer.report.close()
    trainer.engine.close()
    return seen


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").glob("*"))


def all_cases(config: Path, folder: Path) -> list[Seen]:
    """One after the other in the same processes."""
    return [
        train_traced(config, "[1]", folder / "full", go_on),
        train_traced(config, "[0, 1]", folder / "asked", ask_rank_0),
        train_traced(config, "[1]", folder / "stopped", stop_all),
    ]


def recorded(path: Path) -> list[int]:
    """The iterations in a trace; what is no JSON is an error."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = {str(event.get("name", "")) for event in events}
    return sorted(int(n[13:]) for n in found if re.fullmatch(r"ProfilerStep#\d+", n))


@pytest.fixture(scope="module")
def cases(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Seen]]]:
    """The folder of the runs, and for each run what its two ranks saw."""
    folder = tmp_path_factory.mktemp("traces")
    config = small_config(folder / "run.json", corpus, training={"train_iters": 8})
    of_rank = on_ranks(2, all_cases, config, folder, watchdog=120)
    return folder, [list(of_run) for of_run in zip(*of_rank, strict=True)]


def test_no_rank_goes_on_before_a_full_trace_is_written(
    cases: tuple[Path, list[list[Seen]]],
) -> None:
    folder, (run, *_) = cases
    name = "rank1_iterations3-6.pt.trace.json.gz"
    for seen in run:
        assert seen.ended == "done"
        assert seen.traces_at_7 == [name], "a step would hang on the rank that writes"
        assert seen.phases[0] == "trace", "in any other a request to leave would not be patient"
    assert recorded(folder / "full" / "profile" / name) == [3, 4, 5, 6]


def test_asked_to_leave_within_the_window_all_ranks_leave_together_with_whole_traces(
    cases: tuple[Path, list[list[Seen]]],
) -> None:
    folder, (_, run, _) = cases
    expected = [f"rank{rank}_iterations3-4.pt.trace.json.gz" for rank in (0, 1)]
    for seen in run:
        assert seen.ended == "requeue"
        assert seen.traces_at_end == expected
    for name in expected:
        assert recorded(folder / "asked" / "profile" / name) == [3, 4]


def test_stopped_within_the_window_no_rank_leaves_before_the_trace_is_written(
    cases: tuple[Path, list[list[Seen]]],
) -> None:
    """A launcher would end the rank that writes with the first one that leaves."""
    folder, (*_, run) = cases
    name = "rank1_iterations3-4.pt.trace.json.gz"
    for seen in run:
        assert (seen.ended, seen.traces_at_end) == ("as planned", [name])
        assert seen.phases[0] == "trace"
    assert recorded(folder / "stopped" / "profile" / name) == [3, 4]
