"""Threads that act while the main thread waits in a collective, where Python runs no handler.

Called by session.py, which says what to do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable


def when_orphaned(parent: int, act: Callable[[], None]) -> None:
    """Call `act` from a thread of its own once `parent` is no longer this process's parent.

    A launcher that is killed can't take its ranks with it, and they would go on without it.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        act()

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def when_signalled(act: Callable[[signal.Signals], None]) -> None:
    """Call `act` from a thread of its own at each SIGTERM and SIGINT; main thread only.

    Nothing else happens: no KeyboardInterrupt. A SIGTERM that is ignored stays ignored. In forked
    children, such as loader workers, both do what they do by default.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The signal's number is written here at once, whatever the main thread does.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    os.register_at_fork(after_in_child=forget)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                act(signal.Signals(number[0]))

    threading.Thread(target=watch, name="signal-watch", daemon=True).start()
