"""A progress display on stderr: a bar on a terminal, otherwise a plain line now and then.

Called by preprocess. Counts bytes of input, because documents can't be counted beforehand.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm


class Progress:
    """Shows bytes read of `total` bytes, documents, tokens, rates and the time left.

    Off a terminal a line appears every `interval` documents. `begun` bytes were read by an earlier
    run and count for no rate.
    """

    def __init__(self, total: int, *, interval: int, begun: int = 0) -> None:
        self._total = total
        self._interval = interval
        self._begun = begun
        self._start = time.monotonic()
        self._documents = self._tokens = self._shown = 0
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=begun, unit="B", unit_scale=True, file=sys.stderr)

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

    def update(self, position: int, *, documents: int, tokens: int = 0) -> None:
        """Show the bytes read so far, after so many more documents and tokens."""
        self._documents += documents
        self._tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update(position - self._bar.n)
        elif self._documents - self._shown >= self._interval:
            self._shown = self._documents
            rate = (position - self._begun) / self._seconds()
            left = (self._total - position) / rate if rate > 0 else 0.0
            print(
                f"processed {self._documents} documents, {position / 1e6:.1f} of "
                f"{self._total / 1e6:.1f} MB, {rate / 1e6:.2f} MB/s, {self._rates()}, "
                f"{tqdm.format_interval(left)} left",
                file=sys.stderr,
                flush=True,
            )

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _rates(self) -> str:
        seconds = self._seconds()
        return f"{self._documents / seconds:.0f} documents/s, {self._tokens / seconds:.0f} tokens/s"
