"""StopRequest: somebody wants the run to save and leave; the trainer asks between its steps.

Who hears a signal only takes note, so it may come at any moment, even before torch is imported.
"""

from __future__ import annotations

import signal
import threading
import time

PATIENCE = 15.0
"""Seconds that a run is given to end a step, whatever its steps took before."""
SAME_REQUEST = 2.0
"""Seconds in which a launcher passes a signal on that its ranks have got by themselves."""


class StopRequest:
    """What this process was asked; ranks agree on it when they poll (see Trainer)."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Who asked first, or first after SIGUSR1; None: nobody did."""
        self.answered = threading.Event()
        """Set once a trainer knows, or is on its way out."""
        self._asked: float | None = None
        self._polled: float | None = None
        self._longest = 0.0

    def ask(self, reason: str) -> None:
        """Leave at the next occasion."""
        if not self.is_pressing and reason != self.reason:
            self.reason, self._asked = reason, time.monotonic()

    @property
    def is_pressing(self) -> bool:
        """Whether one more request is one too many. SIGUSR1 is a batch system's notice: what comes
        at the time limit itself still leaves the time in which a save may end."""
        return self.reason not in (None, signal.SIGUSR1.name)

    def poll(self) -> str | None:
        """What was asked; called between two steps, on every rank."""
        now = time.monotonic()
        if self._polled is not None:
            self._longest = max(self._longest, now - self._polled)
        self._polled = now
        if self.reason is not None:
            self.answered.set()
        return self.reason

    @property
    def just_asked(self) -> bool:
        """Whether one more signal is part of the request that was made."""
        asked = self._asked if self.is_pressing else None  # launchers don't pass SIGUSR1 on
        return asked is not None and time.monotonic() - asked < SAME_REQUEST

    @property
    def heeded(self) -> bool:
        """Whether anybody polls."""
        return self._polled is not None

    @property
    def patience(self) -> float:
        """Seconds after which a request that is not answered never will be."""
        return max(PATIENCE, 3 * self._longest)

    def listen(self, number: signal.Signals) -> None:
        """Take a signal as such a request from now on; main thread only, before it starts others.

        The signal stays blocked, and a thread waits for it: batch systems may send it to all
        processes of a job, and what this one starts, such as a compiler, would die of it if it did
        not inherit the block. One that came while it was blocked already is heeded as well.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        signal.signal(number, lambda *_: self.ask(number.name))  # for threads from before

        def wait() -> None:
            while True:
                signal.sigwait({number})
                self.ask(number.name)

        threading.Thread(target=wait, name="notice-watch", daemon=True).start()
