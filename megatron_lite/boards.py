"""Boards: every place that the curves of a run go to, on the one process that reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import LoggingConfig
from megatron_lite.engine.deepspeed_setup import connect_csv_monitor
from megatron_lite.monitoring.csv_files import CsvWriter
from megatron_lite.monitoring.histograms import Histogram
from megatron_lite.monitoring.scalars import Position, Scalar, ScalarWriter
from megatron_lite.monitoring.tensorboard import TensorBoardWriter
from megatron_lite.monitoring.wandb_run import WandbWriter


class Boards:
    """Opens what `logging` names; `start` is where this start of the run begins.

    Points that an earlier start left beyond it are set aside, in the way of each place.
    """

    def __init__(
        self, logging: LoggingConfig, run_dir: Path, *, start: Position, config: Mapping[str, Any]
    ) -> None:
        self._writers: list[ScalarWriter] = []
        self._tensorboard: TensorBoardWriter | None = None
        self.tensorboard_dir: Path | None = None
        if logging.tensorboard_dir is not None:
            self.tensorboard_dir = run_dir / logging.tensorboard_dir
            self._tensorboard = TensorBoardWriter(self.tensorboard_dir, start=start)
            self._writers.append(self._tensorboard)
        if logging.csv_dir is not None:
            folder = run_dir / logging.csv_dir
            self._writers.append(CsvWriter(folder, start=start, connect=connect_csv_monitor))
        if logging.wandb_project is not None:
            name = logging.wandb_exp_name or run_dir.resolve().name
            self._writers.append(
                WandbWriter(
                    run_dir, project=logging.wandb_project, name=name, start=start, config=config
                )
            )

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Append points to every curve."""
        points = list(scalars)
        for writer in self._writers:
            writer.write(points)

    def histograms(self, histograms: Mapping[str, Histogram], iteration: int) -> None:
        """Histograms by tag, for TensorBoard."""
        if self._tensorboard is not None and histograms:
            self._tensorboard.histograms(histograms, iteration)

    def texts(self, texts: Mapping[str, str]) -> None:
        """Markdown by tag, for TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.texts(texts)

    def close(self) -> None:
        """Write what is pending."""
        for writer in self._writers:
            writer.close()
