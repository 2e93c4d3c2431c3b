"""A progress display on stderr: a bar on a terminal, otherwise a plain line now and then.

Called by preprocess. Counts bytes of input, because documents can't be counted beforehand.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm


class Progress:
    """Shows bytes read of `total` bytes and the documents so far, every `interval` documents."""

    def __init__(self, total: int, *, interval: int) -> None:
        self._total = total
        self._interval = interval
        self._start = time.monotonic()
        self._documents = self._shown = 0
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, position: int, *, documents: int) -> None:
        """Show the bytes read so far, after `documents` more documents."""
        self._documents += documents
        if self._bar is not None:
            self._bar.update(position - self._bar.n)
            self._bar.set_postfix(documents=self._documents, refresh=False)
        elif self._documents - self._shown >= self._interval:
            self._shown = self._documents
            seconds = max(time.monotonic() - self._start, 1e-9)
            print(
                f"processed {self._documents} documents, {position / 1e6:.1f} of "
                f"{self._total / 1e6:.1f} MB, {position / 1e6 / seconds:.2f} MB/s",
                file=sys.stderr,
                flush=True,
            )
