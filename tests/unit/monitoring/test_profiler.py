"""Traces: the asked-for iterations, on the chosen ranks, in files that other programs read."""

from __future__ import annotations

import gzip
import json
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config.schema import LoggingConfig
from megatron_lite.monitoring.profiler import Profiler, phase, ranged


def config(**changes: Any) -> LoggingConfig:
    given = {"profile": True, "profile_step_start": 3, "profile_step_end": 6, "profile_ranks": (1,)}
    return LoggingConfig(**(given | changes))


def work(profiler: Profiler, first: int, last: int) -> None:
    """Iterations that multiply a matrix under two ranges."""
    multiply = ranged("forward", torch.matmul)
    for iteration in range(first, last + 1):
        profiler.begin(iteration)
        with phase("data"):
            matrix = torch.ones(4, 4)
        multiply(matrix, matrix)
        if profiler.is_full:
            end(profiler)


def end(profiler: Profiler) -> None:
    """As the trainer does where the window or training ends."""
    profiler.stop()
    profiler.write()


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace; what is no JSON is an error."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    assert trace["traceEvents"]
    return list(trace["traceEvents"])


def steps(events: list[dict[str, Any]]) -> list[int]:
    names = {str(event.get("name", "")) for event in events}
    return sorted(int(n[13:]) for n in names if re.fullmatch(r"ProfilerStep#\d+", n))


def test_the_window_and_the_chosen_ranks_alone(tmp_path: Path) -> None:
    """profile_step_start 3: wait in 3, warm up in 4, record 5 and 6; profile_ranks [1]."""
    profilers = [Profiler(config(), tmp_path, rank=rank) for rank in (0, 1)]
    for profiler in profilers:
        work(profiler, 1, 9)
        end(profiler)
    assert [p.name for p in tmp_path.iterdir()] == ["rank1_iterations5-6.pt.trace.json.gz"]
    events = read(next(tmp_path.iterdir()))
    assert steps(events) == [5, 6]
    for name in ("forward", "data", "aten::matmul"):
        assert len([e for e in events if e.get("name") == name and e.get("ph") == "X"]) == 2, name
    off = Profiler(config(profile=False), tmp_path / "off", rank=1)
    work(off, 1, 9)
    assert not (tmp_path / "off").exists()


@pytest.mark.parametrize(("last", "recorded"), [(5, [5]), (4, []), (3, []), (2, [])])
def test_training_that_ends_within_the_window_leaves_what_was_recorded(
    last: int, recorded: list[int], tmp_path: Path
) -> None:
    profiler = Profiler(config(), tmp_path, rank=1)
    work(profiler, 1, last)
    end(profiler)
    names = [path.name for path in tmp_path.iterdir()]
    assert names == [f"rank1_iterations5-{i}.pt.trace.json.gz" for i in recorded]
    for path in tmp_path.iterdir():
        assert steps(read(path)) == recorded


@pytest.mark.parametrize(("last", "recorded"), [(9, [5, 6]), (5, [5]), (4, [5, 6])])
def test_a_run_that_goes_back_over_the_window_keeps_its_first_trace(
    last: int, recorded: list[int], tmp_path: Path
) -> None:
    """Back from `last` to 1; one that had not begun to record yet does so now."""
    profiler = Profiler(config(), tmp_path, rank=1)
    work(profiler, 1, last)
    end(profiler)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    work(profiler, 2, 9)
    end(profiler)
    (trace,) = tmp_path.iterdir()
    assert steps(read(trace)) == recorded
    assert not before or before == {trace: trace.read_bytes()}


def test_a_start_behind_the_window_records_nothing(tmp_path: Path) -> None:
    profiler = Profiler(config(), tmp_path, rank=1)
    work(profiler, 4, 9)
    end(profiler)
    assert not list(tmp_path.iterdir())


def test_all_ranks_follow_the_window_alike(tmp_path: Path) -> None:
    """So each knows when the chosen ones write; in a second round of the window nobody does."""
    for rank in (0, 1):
        profiler = Profiler(config(), tmp_path, rank=rank)
        seen = []
        for iteration in (*range(1, 9), *range(2, 9)):
            profiler.begin(iteration)
            seen.append((profiler.is_within, profiler.is_full))
            if profiler.is_full:
                end(profiler)
        outside = (False, False)
        first = [outside] * 2 + [(True, False)] * 3 + [(True, True)] + [outside] * 2
        assert seen == first + [outside] * 7
        assert len(list(tmp_path.iterdir())) == rank


def test_a_trace_that_cannot_be_written_is_told_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("in the way")
    profiler = Profiler(config(), tmp_path / "profile", rank=1)
    work(profiler, 1, 9)
    err = capsys.readouterr().err
    assert err.startswith("rank 1: the trace is not written: ") and "profile" in err


def test_a_trace_that_torch_breaks_off_on_a_full_disk_is_told_and_removed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch itself tells Python nothing. A limit on the size of files stands for the disk."""
    profiler = Profiler(config(), tmp_path / "profile", rank=1)
    profiler.begin(3)
    for iteration in range(4, 7):
        profiler.begin(iteration)
        for _ in range(100):
            torch.ones(4, 4) @ torch.ones(4, 4)
    profiler.stop()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        profiler.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "rank 1: the trace is not written: it is incomplete" in capfd.readouterr().err
    assert list((tmp_path / "profile").iterdir()) == []
