"""Outcome: RUN_DIR/status.json. Launchers lose exit codes, a file does not.

Knows nothing of training and imports no torch. Written by train.py and session.py, read by whoever
started the run; each start begins without one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FINAL = ("failed", "refused")
"""States that a rank which fails later, mostly because of the first one, must not replace."""


class Outcome:
    """The status of a run as one rank sees and tells it."""

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank

    def read(self) -> dict[str, Any]:
        """The status as it stands; {} where there is none yet."""
        try:
            status: dict[str, Any] = json.loads((self._run_dir / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status

    def version(self) -> tuple[int, int] | None:
        """Another one after each change of the status; None where there is none yet."""
        try:
            file = (self._run_dir / "status.json").stat()
        except OSError:
            return None
        return file.st_ino, file.st_mtime_ns

    def write(self, state: str, **facts: Any) -> None:
        """Replace the status; rank 0 speaks for all."""
        if self._rank == 0:
            self._replace({"state": state, **facts})

    def end(self, state: str, error: str, *, rank: int | None = None, **facts: Any) -> bool:
        """Tell how the run ended, and because of which rank (None: this one).

        False where another rank was faster; what it told stays. Where nothing can be written, this
        rank's console is all there is.
        """
        rank = self._rank if rank is None else rank
        before = self.read()
        if before.get("state") in FINAL:
            return before.get("rank") == rank
        with suppress(OSError):
            self._replace({"state": state, "rank": rank, "error": error, **facts})
        return True

    def forget(self) -> None:
        """Remove what an earlier start of the run has told; rank 0 does, before others can tell.

        Its end would be taken for this one's, or keep this one's from being told.
        """
        if self._rank == 0:
            with suppress(OSError):
                (self._run_dir / "status.json").unlink()

    def repeat(self) -> None:
        """Write the status as it stands once more: another version of it."""
        self._replace(self.read())

    def _replace(self, status: Mapping[str, Any]) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        new = self._run_dir / f".status-{self._rank}.json"
        text, path = json.dumps(status, indent=2) + "\n", self._run_dir / "status.json"
        try:
            new.write_text(text)
        except OSError:  # a full disk: the file that is there has room for a status
            new.unlink(missing_ok=True)
            with path.open("r+") as file:
                file.write(text)
                file.truncate()
        else:
            new.replace(path)
