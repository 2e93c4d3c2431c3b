"""What every command-line tool shares: exceptions → stderr and exit code, never a traceback.

Codes: 0 done, 1 failed, 2 bad usage or input, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota has no room left."""
    return isinstance(error, OSError) and error.errno in _FULL


def reason(error: OSError) -> str:
    """What is wrong, in words that say what to do where the system's own don't."""
    if isinstance(error, FileExistsError):  # where a folder is wanted
        return "is there already, and is no folder"
    text = error.strerror or str(error)
    return f"{text}; free some, or write elsewhere" if is_full(error) else text


def run_tool(
    main: Callable[[], None],
    *,
    refused: type[Exception],
    failed: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted; nothing was left behind",
) -> int:
    """Run a tool and return its exit code; `refused` are faults of the input."""
    signal.signal(signal.SIGTERM, _terminated)  # so that temporary files and workers go too
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of files need not be UTF-8
    try:
        main()
        print(end="", flush=True)
    except refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {reason(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return 0


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
