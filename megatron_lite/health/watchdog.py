"""Watchdog: a thread that lets a rank's heartbeat beat, and acts where nothing moves any more.

It runs while the main thread waits in a collective. Where C code holds Python's lock it can't, and
readers see that the beat stopped; then faulthandler's timer, a thread without Python, writes the
stacks and ends the process. Put together by life.py; session.py says what to do.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import TextIO

from megatron_lite.health import stacks
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.processes import own_work
from megatron_lite.health.record import RecordFile

STACKS_AFTER = 60.0
"""Seconds without movement after which a rank writes its stacks, or a third of the limit."""
GRACE = 60.0
"""Seconds by which others give up later than the watchdog: collectives, and faulthandler's timer.
So the watchdog's word, which names the rank that hangs, is the first one."""
_CORES, _BYTES = 0.2, 1e6
"""What counts as work, a second. Reading, writing and computing are movement where a process works
alone; but a process that hangs has threads that watch, of which a slow machine makes a twentieth of
a core. (NCCL computes while it waits: there a hang is left to the collectives' own time-out.)"""


class Watchdog:
    """One rank's; started once, and stopped at the end of the run."""

    def __init__(self, heartbeat: Heartbeat, stacks_file: TextIO, *, pulse_seconds: float) -> None:
        self._heartbeat, self._pulse_seconds = heartbeat, pulse_seconds
        self._stacks = stacks_file
        self._count, self._changes, self._work = 0, 0, (0.0, 0)
        self.still = 0.0
        """Seconds without movement; the time in which the process was stopped does not count."""
        self._limit: float | None = None
        self._hung: Callable[[], None] = _nothing
        self._armed_at, self._told, self._failed = 0.0, False, False
        self._acting: Thread | None = None
        self._end = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Beat from now on."""
        self._thread.start()
        if self._heartbeat.file is not None:
            # In another thread: a file system that hangs must not keep this one from its watch.
            Thread(
                target=self._sync, args=[self._heartbeat.file], name="heartbeat", daemon=True
            ).start()

    def arm(self, limit: float, hung: Callable[[], None]) -> None:
        """Call `hung`, from a thread of its own, when nothing has moved for `limit` seconds, and
        again at a later beat where it returns: it may find that other ranks do move."""
        self._limit, self._hung = limit, hung

    def stop(self) -> None:
        """End the thread: the process groups that it asks are about to go."""
        self._end.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        last = time.monotonic()
        self.beat(0.0)
        while not self._end.wait(self._pulse_seconds):
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, did not stand still meanwhile.
            self.beat(min(now - last, 2 * self._pulse_seconds))
            last = now

    def beat(self, seconds: float) -> None:
        """Look whether anything moved in the last `seconds`, and tell."""
        self.still = 0.0 if self._moved(seconds) else self.still + seconds
        self._tell()
        self._set_timer()
        if self.still == 0.0:
            self._told = False
        elif not self._told and self.still >= self._stacks_after():
            self.write_stacks(f"nothing has moved for {self.still:.0f} s")
            self._told = True
        if self._limit is not None and self.still >= self._limit:
            self._act()

    def _act(self) -> None:
        # In another thread: it looks at the others for seconds, and this one has to beat for them.
        if self._acting is None or not self._acting.is_alive():
            self._acting = Thread(target=self._hung, name="watchdog-acts", daemon=True)
            self._acting.start()

    def _moved(self, seconds: float) -> bool:
        before, self._changes = self._changes, self._heartbeat.changes
        worked, self._work = self._work, own_work()
        if self._changes != before:
            return True
        if not self._heartbeat.works_alone:
            return False
        busy = self._work[0] - worked[0] > _CORES * seconds
        return busy or self._work[1] - worked[1] > _BYTES * seconds

    def _tell(self) -> None:
        file = self._heartbeat.file
        if file is not None:
            self._count += 1
            file.pulse(self._count, time.time(), self.still, self._heartbeat.collectives())

    def _sync(self, file: RecordFile) -> None:
        while not self._end.wait(self._pulse_seconds):
            try:
                file.sync()
            except OSError as error:  # training need not end with it, but a person should know
                print(f"the heartbeat is not synced: {error}", file=sys.stderr, flush=True)
                return

    def _stacks_after(self) -> float:
        return STACKS_AFTER if self._limit is None else min(STACKS_AFTER, self._limit / 3)

    def _set_timer(self) -> None:
        """Put faulthandler's timer off, now and then: it starts a thread each time."""
        now = time.monotonic()
        if self._limit is None or now - self._armed_at < self._limit / 10:
            return
        self._armed_at = now
        seconds = self._limit * 1.1 + GRACE
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)

    def write_stacks(self, why: str) -> None:
        """Add the stacks of all threads to the rank's file."""
        beat = self._heartbeat
        try:
            stacks.write(self._stacks, f"{beat.phase} of iteration {beat.iteration}: {why}")
        except OSError as error:  # the watch goes on without them; a person should know, once
            if not self._failed:
                print(f"stacks can't be written: {error}", file=sys.stderr, flush=True)
            self._failed = True


def _nothing() -> None:
    """No limit yet."""
