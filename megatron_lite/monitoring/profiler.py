"""Profiler: torch.profiler over a window of iterations, on chosen ranks, and names for its ranges.

Outside the window it costs nothing. The trainer says where it is, and lets all ranks wait for those
that write; nothing here does.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron_lite.config.schema import LoggingConfig

_LAST_KEY, _TAIL = b'"traceName"', 1 << 16
"""What torch writes last, and how many bytes at the end of a trace surely hold it."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Profiler:
    """Waits one iteration from `profile_step_start` on, warms up one, records those after it.

    The trace is `folder/rank<R>_iterations<A>-<B>.pt.trace.json.gz`; in it iterations are called
    `ProfilerStep#` and their number. Perfetto, chrome://tracing and TensorBoard's plugin for torch
    open it. All recorded iterations are in memory until it is written. A start of the run that
    begins behind `profile_step_start` records nothing, and none records twice: a run that goes back
    may meet the window again.

    Ranks that are not chosen follow the window too, so that all know when the others write.
    """

    def __init__(self, config: LoggingConfig, folder: Path, *, rank: int) -> None:
        self._asked, self._chosen = config.profile, rank in config.profile_ranks
        self._begin, self._last = config.profile_step_start, config.profile_step_end
        self._folder, self._rank = folder, rank
        self._at: int | None = None
        """The window's iteration that has begun; None outside of it."""
        self._profile: profile | None = None
        self._recorded: tuple[profile, int] | None = None
        """What is not written yet, with its last iteration."""
        self._done = False

    def begin(self, iteration: int) -> None:
        """An iteration begins, the one after the last call's or, after `stop`, any."""
        if self._at is not None:
            if self._profile is not None:
                self._profile.step()
            self._at = iteration
        elif self._asked and not self._done and iteration == self._begin:
            self._at = iteration
            if self._chosen:
                self._start()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(
            skip_first=self._begin,
            wait=1,
            warmup=1,
            active=self._last - self._begin - 1,
            repeat=1,
        )
        self._profile = profile(activities=activities, schedule=plan, on_trace_ready=self._keep)
        self._profile.step_num = self._begin  # so that steps are called by their iteration
        self._profile.start()

    def _keep(self, recorded: profile) -> None:
        assert self._at is not None
        self._recorded = recorded, self._at

    @property
    def is_within(self) -> bool:
        """Whether the window is open; the same on all ranks."""
        return self._at is not None

    @property
    def is_full(self) -> bool:
        """Whether all iterations of an open window have begun; the same on all ranks."""
        return self._at == self._last

    def stop(self) -> None:
        """Record no more: the window is over, or training ends or goes back within it."""
        if self._at is None:
            return
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        self._done, self._at = self._at >= self._begin + 2, None

    def write(self) -> None:
        """Write what was recorded, if anything was.

        Training need not end with it where that fails, but a person should know.
        """
        if self._recorded is None:
            return
        (recorded, last), self._recorded = self._recorded, None
        name = f"rank{self._rank}_iterations{self._begin + 2}-{last}.pt.trace.json.gz"
        unfinished = self._folder / f".{name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(unfinished))
            _require_whole(unfinished)
            unfinished.rename(self._folder / name)
        except OSError as error:
            said = f"rank {self._rank}: the trace is not written: {error}"
            print(said, file=sys.stderr, flush=True)
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _require_whole(trace: Path) -> None:
    """OSError for a trace that torch could not write to its end, which it tells nobody."""
    tail = b""
    with gzip.open(trace) as file:
        while chunk := file.read(1 << 20):
            tail = (tail + chunk)[-_TAIL:]
    if not (_LAST_KEY in tail and tail.rstrip().endswith(b"}")):
        raise OSError(f"it is incomplete; is {tempfile.gettempdir()} (TMPDIR) full?")


def phase(name: str) -> AbstractContextManager[None]:
    """A with-block whose time is shown under `name` in a trace, and nothing where none is made."""
    # A range costs a tenth of a millisecond where caches are cold, as after a wait.
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def ranged(name: str, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, each call of it a `phase`."""

    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with phase(name):
            return function(*args, **kwargs)

    return run
