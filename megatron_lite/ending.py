"""Ending: how one rank leaves a run that did not go well, and what it leaves word of.

One rank's story is told, once: in status.json and on stderr. Used by session.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import NoReturn

from megatron_lite.command import is_full, reason
from megatron_lite.health.heartbeat import Heartbeat
from megatron_lite.health.peers import Peers
from megatron_lite.health.stopping import StopRequest
from megatron_lite.outcome import FINAL, Outcome

FAILED, REFUSED = 1, 2
BY_SIGNAL = 128
"""Added to a signal's number, as shells do."""
PATIENCE = 5.0
"""Seconds in which all ranks have met an error of the input, if they meet it at all."""
WORD = 60.0
"""Seconds that rank 0 has to tell what all have agreed on; it may remove a failed save before."""
_RANK_0_FIRST = 3.0
"""Seconds in which rank 0 tells of an error that it has met as well; below PATIENCE."""
_LOOK = 1.0
"""Seconds between two looks at what a run that was asked to leave is doing."""
_NO_LAUNCHER = "the launcher is gone"
_LOST = ("onnection closed by peer", "onnection reset by peer", "roken pipe", "ncclRemoteError")
"""What gloo and NCCL say when another rank's process is no more."""


class Ending:
    """The bad ends of this rank; each ends the process."""

    def __init__(
        self, outcome: Outcome, stop: StopRequest, *, rank: int, world_size: int = 1
    ) -> None:
        self.outcome, self.stop = outcome, stop
        self._rank, self._world_size = rank, world_size
        self.peers: Peers | None = None
        """Known once the process group is there."""
        self.heartbeat: Heartbeat | None = None
        """Known once it beats."""
        self.settled = False
        """Whether the run is over and its outcome known."""

    def settle(self) -> None:
        """All ranks have agreed that the run is over, and how; main thread only.

        What comes later changes nothing any more: a request to leave, or what a launcher sends when
        it sees the first of them leave with another code than 0. Python's own end would give the
        signals back their power to kill.
        """
        self.settled = True
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While ranks look for each other only the status tells that one of them has given up: its
        port may be held by a program that lets the others wait for ever."""
        before, met = self.outcome.version(), Event()

        def watch() -> None:
            while not met.wait(1.0):
                # In this order, or rank 0 may remove the status of an earlier start in between.
                changed = self.outcome.version() not in (None, before)
                if changed and self._told():
                    self._tell_the_cause()
                    _leave(FAILED)

        if self._rank > 0:
            Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            met.set()

    def refused(self, error: Exception, *, unmet: bool = False) -> NoReturn:
        """The input is at fault. All ranks meet most such errors: rank 0 tells, or, if it met none,
        the first of the others. `unmet` marks that it is about the meeting of the ranks itself."""
        teller, marks = 0, {"unmet": True} if unmet else {}
        if self._rank > 0 and self.peers is None:
            self._refused_before_the_meeting(str(error), marks)
        elif self._rank > 0 and self.peers is not None:
            teller = min(self.peers.leave(patience=PATIENCE))
        if self._rank == teller:
            self.outcome.end("refused", str(error), **marks)
            print(error, file=sys.stderr, flush=True)
        if self._rank == 0 and self.peers is not None:
            self.peers.leave(patience=PATIENCE)
        elif self._rank == 0 and self._world_size > 1:
            time.sleep(PATIENCE)  # for ranks that began later and took the status for an old one
            self.outcome.repeat()
        _leave(REFUSED)

    def _refused_before_the_meeting(self, error: str, marks: Mapping[str, bool]) -> None:
        time.sleep(_RANK_0_FIRST)
        if not self._told():
            self.outcome.end("refused", error, **marks)
            print(f"rank {self._rank}: {error}", file=sys.stderr, flush=True)
        elif self.outcome.read().get("error") != error:
            self._tell_the_cause()

    def stopped(self, error: Exception, *, hung: bool = False) -> NoReturn:
        """All ranks agreed that the run can't go on; `hung`: since some of them are not heard."""
        if self._rank == 0:
            self.outcome.end("failed", str(error), **({"hung": True} if hung else {}))
            print(f"training stopped: {error}", file=sys.stderr, flush=True)
        if self.peers is not None:
            # The launcher ends all of them when the first one leaves.
            word = WORD if self.stop.heeded else PATIENCE
            self.peers.leave(patience=PATIENCE, for_rank_0=word)
        _leave(FAILED)

    def failed(self, error: BaseException) -> NoReturn:
        """This rank failed, perhaps only because another one was gone."""
        said, story = f"{type(error).__name__}: {error}", f":\n{traceback.format_exc()}"
        if isinstance(error, OSError) and is_full(error):
            said = f"{error.filename or 'writing what the run leaves'}: {reason(error)}"
            story = f": {said}"
        if isinstance(error, SystemExit):
            said = f"the process ended by itself, with exit code {error.code}, before training did"
        if isinstance(error, RuntimeError):
            time.sleep(0.5)  # a dying process's sockets close a moment before it ends
        if self._first(said):
            print(f"rank {self._rank} failed{story}", file=sys.stderr, flush=True)
        else:
            self._tell_the_cause()
        _leave(FAILED)

    def hung(self, examine: Callable[[], tuple[int | None, str] | None], *, after: float) -> None:
        """Nothing has moved here for too long, and this thread is not the one that hangs.

        `examine` tells which rank is the cause, if any, and the story; None where other ranks move,
        so that there is no reason to end. Returns in this case alone. Others have `after` seconds
        to tell it first.
        """
        if not self._told():
            time.sleep(after)
        found = None if self._told() else examine()
        if self._told():  # by another rank, perhaps while this one looked
            self._tell_the_cause()
        elif found is None:
            return
        else:
            rank, said = found
            self.outcome.end("failed", said, rank=rank, hung=True)
            print(f"rank {self._rank} ends the run: {said}", file=sys.stderr, flush=True)
        if self.peers is not None:
            self.peers.end_stopped()
        _leave(FAILED)

    def _told(self) -> bool:
        return self.outcome.read().get("state") in FINAL

    def signalled(self, number: signal.Signals) -> None:
        """Somebody wants this process to end: a launcher that saw another rank die, or a person.

        Training that goes well is asked to save first. It ends at once if a peer has died, at a
        second signal, and when no step ends (a save or load may take its time).
        """
        if not self.settled:
            self._ask(number.name, BY_SIGNAL + number)

    def launcher_gone(self) -> None:
        """The launcher of the launcher has ended: killed, or by Ctrl-C as this process was."""
        if not self.settled and self.stop.reason is None:
            self._ask(_NO_LAUNCHER, FAILED)

    def orphaned(self) -> NoReturn:
        """The launcher has died."""
        self._first(_NO_LAUNCHER)
        _leave(FAILED)

    def _ask(self, why: str, code: int) -> None:
        lost = [] if self.peers is None else self.peers.gone()
        if self.stop.just_asked and not lost:
            return
        if self.stop.heeded and not self.stop.is_pressing and not lost:
            self.stop.ask(why)
            Thread(target=self._wait_for_the_answer, args=[why, code], daemon=True).start()
        else:
            self._stopped_by(why, code)

    def _wait_for_the_answer(self, why: str, code: int) -> None:
        waited, beat = 0.0, self.heartbeat
        while not self.stop.answered.wait(_LOOK):
            if beat is None or not beat.takes_its_time:  # as a checkpoint does, or a compiler
                waited += _LOOK
            if waited >= self.stop.patience or self._told():
                self._stopped_by(why, code)
                break

    def _stopped_by(self, why: str, code: int) -> None:
        if self.settled:  # meanwhile
            return
        if self._first(f"stopped by {why}"):
            print(f"rank {self._rank} stops: {why}", file=sys.stderr, flush=True)
        else:
            self._tell_the_cause()
        _leave(code)

    def _tell_the_cause(self) -> None:
        status = self.outcome.read()
        cause = f"rank {status.get('rank')}: {status.get('error')}"
        print(f"rank {self._rank} stops because of {cause}", file=sys.stderr, flush=True)

    def _first(self, said: str) -> bool:
        """Leave word, of a rank that died without one if there is any; True if that is this one."""
        if self.settled:
            return True
        lost = [] if self.peers is None else self.peers.gone()
        if not lost:
            # Of a rank on another machine only its closed connection tells; one that failed by
            # itself has left word before that.
            gone = {"lost_peer": True} if any(sign in said for sign in _LOST) else {}
            return self.outcome.end("failed", said, **gone)
        said = f"ended without a word: killed, or left early; rank {self._rank} noticed ({said})"
        self.outcome.end("failed", said, rank=lost[0])
        return False


def _leave(code: int) -> NoReturn:
    """End this process at once.

    Not by way of the interpreter's end: destructors of process groups can wait for ever for peers,
    and loader workers would be joined (left alone they end by themselves).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
