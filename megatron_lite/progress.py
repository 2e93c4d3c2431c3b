"""Progress: the trainer's position in a run; saved, and all that is needed to go on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counts since the beginning of the run, over all its starts."""

    iteration: int = 0
    """Steps taken, skipped ones included."""
    consumed_samples: int = 0
    left_out_samples: int = 0
    """Samples that data.skip_samples left out, instead of which others were consumed."""
    data_start: int = 0
    """Number of the first sample of the present blend, of which it is sample 0."""
    source_samples: dict[str, int] = field(default_factory=dict)
    """Samples that each source of the training data has given: where in it the run goes on."""
    updates: int = 0
    """Steps that changed the weights: the position of the learning-rate schedule."""
    skipped: int = 0
    """Steps that changed nothing."""
    nan: int = 0
    """Iterations whose loss was not finite."""
    rewinds: int = 0
    """Times that the run went back to a checkpoint; the counts above know nothing of what was lost
    then."""
    skip_samples: list[list[int]] = field(default_factory=list)
    """[first, last) of the training samples that rewinds left out, beside data.skip_samples."""
    recent_losses: list[float] = field(default_factory=list)
    """What training.loss_spike compares a loss with."""
    evaluation_due: bool = False
    """An evaluation at this iteration was broken off when the run was asked to leave."""

    @property
    def next_sample(self) -> int:
        """Number of the next sample: those before it were consumed or left out."""
        return self.consumed_samples + self.left_out_samples

    def advance(self, *, samples: int, left_out: int = 0, applied: bool) -> None:
        """Count one step; a skipped one consumes its samples but is no update."""
        self.iteration += 1
        self.consumed_samples += samples
        self.left_out_samples += left_out
        self.updates += applied
        self.skipped += not applied
        self.evaluation_due = False
