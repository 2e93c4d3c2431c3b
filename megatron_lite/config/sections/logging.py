"""`logging`: what a run reports, and how often."""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import DERIVE, Derived, Flag, PositiveWhole, Section, Text, Whole


class LoggingConfig(Section):
    """What a run reports, and how often."""

    log_interval: PositiveWhole = 10
    """Optimizer steps between two reports on the console, in metrics.jsonl and on all curves."""

    tensorboard_dir: Text | None = "tensorboard"
    """Folder of the TensorBoard events, in the run's folder if relative. null: none."""

    csv_dir: Text | None = None
    """Folder of CSV files, a file a curve, in the run's folder if relative. null: none."""

    wandb_project: Text | None = None
    """Project at Weights & Biases to log to; needs the package wandb. null: none."""

    wandb_exp_name: Text | None = None
    """Name of the run at Weights & Biases. null: that of the run folder."""

    log_params_norm: Flag = False
    """Log the 2-norm of all weights, each logical element once. Reads every master weight."""

    log_num_zeros_in_grad: Flag = False
    """Log how many elements of the averaged gradient are zero. Reads every gradient."""

    log_histograms_interval: Whole = 0
    """Optimizer steps between two histograms of each layer's weights in TensorBoard, a multiple of
    log_interval. 0: none."""

    profile: Flag = False
    """Record a trace with torch.profiler: one step of waiting, one of warm-up, then the others."""

    profile_step_start: PositiveWhole = 10
    """Iteration that the profiler waits in; it warms up in the next, and records from the one after
    that."""

    profile_step_end: Derived[PositiveWhole] = DERIVE
    """Last iteration that is recorded. null: profile_step_start + 4, so that three are."""

    profile_ranks: tuple[Whole, ...] = (0,)
    """Ranks that record; each writes a file to the folder `profile` of the run."""

    deepspeed_log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    """Least important messages of DeepSpeed that are shown."""
