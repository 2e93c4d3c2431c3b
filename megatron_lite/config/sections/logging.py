"""`logging`: what a run reports, and how often."""

from __future__ import annotations

from typing import Literal

from megatron_lite.config.fields import PositiveWhole, Section, Text


class LoggingConfig(Section):
    """What a run reports, and how often."""

    log_interval: PositiveWhole = 10
    """Optimizer steps between two reports on the console, in metrics.jsonl and in TensorBoard."""

    tensorboard_dir: Text | None = "tensorboard"
    """Folder of the TensorBoard events, in the run's folder if relative. null: none."""

    deepspeed_log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    """Least important messages of DeepSpeed that are shown."""
