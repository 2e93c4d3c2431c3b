"""Threads that act while the main thread waits in a collective, where Python runs no handler.

Called by session.py, which says what to do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path


def when_orphaned(child: int, parent: int, act: Callable[[], None]) -> None:
    """Call `act` from a thread of its own once `parent` is no longer the parent of `child`, which
    is this process or one above it.

    A launcher that is killed can't take its ranks with it, and they would go on without it.
    """

    def watch() -> None:
        while parent_of(child) == parent:
            time.sleep(1.0)
        act()

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def parent_of(pid: int) -> int:
    """Process id of a process's parent; 0 where that process is no more."""
    if pid == os.getpid():
        return os.getppid()
    try:
        # The name in brackets may hold anything; state and parent follow it.
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])


def when_signalled(act: Callable[[signal.Signals], None]) -> None:
    """Call `act` from a thread of its own at each SIGTERM and SIGINT; main thread only.

    Nothing else happens: no KeyboardInterrupt. A SIGTERM that is ignored stays ignored. Forked
    children, such as loader workers, heed their parent's SIGTERM alone.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The signal's number is written here at once, whatever the main thread does.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)

    os.register_at_fork(after_in_child=_heed_the_parent)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                act(signal.Signals(number[0]))

    threading.Thread(target=watch, name="signal-watch", daemon=True).start()


def _heed_the_parent() -> None:
    """In a forked child: end at a SIGTERM of the parent, and at nothing else that is sent to all.

    Ctrl-C goes to every process of a terminal, and deepspeed's launcher sends SIGTERM to all
    descendants; the parent needs its loader workers until it has saved.
    """
    parent = os.getppid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="signal-watch", daemon=True).start()
