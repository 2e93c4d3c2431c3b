"""`checkpoint`: when to save, what to load. Relative folders lie in the run's folder."""

from __future__ import annotations

from megatron_lite.config.fields import DERIVE, Derived, Flag, PositiveWhole, Section, Text, Whole


class CheckpointConfig(Section):
    """When to save, what to load."""

    save: Text | None = None
    """Folder that checkpoints are written to. null: nothing is saved."""

    load: Text | None = None
    """Folder that the run continues from. null: start from initial weights."""

    save_interval: Whole = 0
    """Optimizer steps between two checkpoints. 0: only at the end of the run."""

    keep_last: PositiveWhole | None = None
    """Newest checkpoints that are kept; older ones are deleted. null: all."""

    ckpt_step: Whole | None = None
    """Step of the checkpoint to load. null: the latest."""

    exit_on_missing_checkpoint: Derived[Flag] = DERIVE
    """Fail where `load` holds no checkpoint, rather than start from initial weights. null: true if
    load is given."""
