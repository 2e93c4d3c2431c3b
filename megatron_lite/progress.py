"""Progress: the trainer's position in a run; saved, and all that is needed to go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Counts since the beginning of the run, over all its starts."""

    iteration: int = 0
    """Steps taken, skipped ones included."""
    consumed_samples: int = 0
    data_start: int = 0
    """Samples that were consumed when the present data began; their first sample is this one's."""
    updates: int = 0
    """Steps that changed the weights: the position of the learning-rate schedule."""
    skipped: int = 0
    nan: int = 0
    """Iterations whose loss was not finite."""

    def advance(self, *, samples: int, applied: bool) -> None:
        """Count one step; a skipped one consumes its samples but is no update."""
        self.iteration += 1
        self.consumed_samples += samples
        self.updates += applied
        self.skipped += not applied
