"""What every command-line tool shares: exceptions → stderr and exit code, never a traceback.

Codes: 0 done, 1 failed, 2 bad usage or input, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def run_tool(
    main: Callable[[], None],
    *,
    refused: type[Exception],
    failed: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted; nothing was left behind",
) -> int:
    """Run a tool and return its exit code; `refused` are faults of the input."""
    signal.signal(signal.SIGTERM, _terminated)  # so that temporary files and workers go too
    try:
        main()
        sys.stdout.flush()
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
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return 0


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
