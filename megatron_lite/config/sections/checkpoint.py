"""`checkpoint`: when to save, what to load. Relative folders lie in the run's folder."""

from __future__ import annotations

from typing import Literal

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

    async_save: Flag = False
    """Copy the states in memory and let a thread write them while training goes on; needs three
    times 4 bytes of host memory for each parameter that a rank owns."""

    ckpt_step: Whole | None = None
    """Step of the checkpoint to load. null: the latest."""

    exit_on_missing_checkpoint: Derived[Flag] = DERIVE
    """Fail where `load` holds no checkpoint, rather than start from initial weights. null: true if
    load is given."""

    verify_on_load: Flag = True
    """Compare the checksums of all files, which the ranks read between them, before anything is
    loaded."""

    fall_back_to_older: Flag = False
    """Where the latest checkpoint is damaged, load the newest whole one. false: stop."""

    finetune: Flag = False
    """Start a new run from the weights alone: no optimizer states, counts and schedule at 0."""

    no_load_optim: Flag = False
    """Go on with the weights and counts, with an optimizer and loss scale that start anew."""

    no_load_rng: Flag = False
    """Seed random streams anew although the layout is the one that was saved."""

    strict: Flag = True
    """Stop where the checkpoint lacks tensors of the model or has others. false: list them; what is
    missing keeps its initial weights. Shapes must agree in any case."""

    changed_data: Literal["stop", "continue", "restart"] = "stop"
    """What to do where the data or the seed are not the checkpoint's. continue: go on where each
    source stands, for the same data in another place or by other weights; a new source begins.
    restart: read all from their beginning."""
