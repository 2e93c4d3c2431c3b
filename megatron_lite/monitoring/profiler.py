"""Profiler: torch.profiler over a window of iterations, on chosen ranks, and names for its ranges.

Outside the window it costs nothing. The trainer says where it is; nothing here stops or waits for
other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megatron_lite.config.schema import LoggingConfig

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Profiler:
    """Waits one iteration from `profile_step_start` on, warms up one, records those after it.

    The trace is `folder/rank<R>_iterations<A>-<B>.pt.trace.json.gz`; in it iterations are called
    `ProfilerStep#` and their number. Perfetto, chrome://tracing and TensorBoard's plugin for torch
    open it. All recorded iterations are in memory until it is written. A start of the run that
    begins behind `profile_step_start` records nothing, and none records twice: a run that goes back
    may meet the window again.
    """

    def __init__(self, config: LoggingConfig, folder: Path, *, rank: int) -> None:
        self._chosen = config.profile and rank in config.profile_ranks
        self._begin, self._last = config.profile_step_start, config.profile_step_end
        self._folder, self._rank = folder, rank
        self._profile: profile | None = None
        self.written: Path | None = None

    def begin(self, iteration: int) -> None:
        """An iteration begins, the one after the last call's or, after `close`, any."""
        if self._profile is not None:
            self._profile.step()
            if iteration > self._last:
                self._end()
        elif self._chosen and self.written is None and iteration == self._begin:
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
            self._profile = profile(
                activities=activities, schedule=plan, on_trace_ready=self._write
            )
            self._profile.step_num = iteration  # so that steps are called by their iteration
            self._profile.start()

    def close(self) -> None:
        """Training has ended or goes back: write what was recorded, if any."""
        if self._profile is not None:
            self._end()

    def _end(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._profile = None

    def _write(self, recorded: profile) -> None:
        # The step counter stands on the iteration after the last one, or, if training ended within
        # the window, on the last one.
        last = min(recorded.step_num, self._last)
        name = f"rank{self._rank}_iterations{self._begin + 2}-{last}.pt.trace.json.gz"
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".{name}"
        recorded.export_chrome_trace(str(unfinished))
        self.written = unfinished.rename(self._folder / name)


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
