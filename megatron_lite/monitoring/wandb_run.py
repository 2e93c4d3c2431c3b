"""A run's curves at Weights & Biases, through the package wandb, which is optional.

A W&B run can't take a step back, so a start of our run that goes on from before its last logged
step gets a W&B run of its own, in the same group. Called by the reporter, on rank 0.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_lite.monitoring.scalars import VS_SAMPLES, Position, Scalar

STATE = "wandb_run.json"
"""In the run folder: id and last logged step of the W&B run that is written."""


class WandbWriter:
    """Logs points with the iteration as step, and consumed samples as a curve to use as x.

    A start that goes on behind the last logged step continues the W&B run (`resume`); any other one
    opens a new one in the group `name`, and the old one keeps its curve. Offline, W&B keeps each
    start in a folder of its own, which `wandb sync --append` joins.
    """

    def __init__(
        self, run_dir: Path, *, project: str, name: str, start: Position, config: Mapping[str, Any]
    ) -> None:
        import wandb

        self._state = run_dir / STATE
        before = _read(self._state)
        continues = before is not None and before[1] <= start.iteration
        if before is not None and continues:
            self._id, self._last = before
        else:
            self._id, self._last = uuid.uuid4().hex[:8], start.iteration
        self._run = wandb.init(
            project=project,
            name=name if before is None or continues else f"{name} from {start.iteration}",
            group=name,
            id=self._id,
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )
        self._remember()

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Logs points; those over samples are left to W&B's choice of an x axis."""
        by_step: dict[int, dict[str, float]] = {}
        for tag, value, step in scalars:
            if not tag.endswith(VS_SAMPLES):
                by_step.setdefault(step, {})[tag] = value
        for step, values in sorted(by_step.items()):
            self._run.log(values, step=step)
            self._last = max(self._last, step)
        self._remember()

    def close(self) -> None:
        """Waits until everything is sent or on disk."""
        self._run.finish()

    def _remember(self) -> None:
        new = self._state.with_name(f".{STATE}.new")
        new.write_text(json.dumps({"id": self._id, "iteration": self._last}) + "\n")
        new.replace(self._state)


def _read(path: Path) -> tuple[str, int] | None:
    try:
        found = json.loads(path.read_text())
        return str(found["id"]), int(found["iteration"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
