"""CSV files by DeepSpeed's monitor, and a resumed run that goes on in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed import comm

from megatron_lite.engine.deepspeed_setup import connect_csv_monitor
from megatron_lite.monitoring.csv_files import CsvWriter
from megatron_lite.monitoring.scalars import Position, Scalar


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's monitor asks which rank this is; no group is made here."""
    monkeypatch.setattr(comm, "get_rank", lambda: 0)


def write(folder: Path, first: int, last: int) -> None:
    """A start of a run with 4 samples a step that logs every iteration."""
    start = Position(first - 1, 4 * (first - 1))
    writer = CsvWriter(folder, start=start, connect=connect_csv_monitor)
    for i in range(first, last + 1):
        points = [Scalar("lm loss", first, i), Scalar("lm loss vs samples", first, 4 * i)]
        writer.write([*points, Scalar("idle-time/stage 0", 0.5, i)])
    writer.close()


def test_b52_a_resumed_run_has_every_step_once(tmp_path: Path, one_rank: None) -> None:
    write(tmp_path, 1, 6)
    write(tmp_path, 4, 8)
    losses = [1, 1, 1, 4, 4, 4, 4, 4]
    expected = [f"{i + 1},{loss}" for i, loss in enumerate(losses)]
    assert (tmp_path / "lm_loss.csv").read_text().splitlines() == ["step,lm loss", *expected]
    samples = (tmp_path / "lm_loss_vs_samples.csv").read_text().splitlines()
    assert samples[1:] == [f"{4 * (i + 1)},{loss}" for i, loss in enumerate(losses)]
    aside = tmp_path / "superseded" / "lm_loss.csv"
    assert aside.read_text().splitlines() == ["4,1", "5,1", "6,1"]
    assert len((tmp_path / "idle-time_stage_0.csv").read_text().splitlines()) == 9


def test_a_torn_line_is_set_aside(tmp_path: Path, one_rank: None) -> None:
    write(tmp_path, 1, 2)
    path = tmp_path / "lm_loss.csv"
    with path.open("a") as file:
        file.write("3,0.")
    write(tmp_path, 3, 3)
    assert path.read_text().splitlines() == ["step,lm loss", "1,1", "2,1", "3,3"]


def test_going_on_where_it_ended_moves_nothing(tmp_path: Path, one_rank: None) -> None:
    write(tmp_path, 1, 3)
    write(tmp_path, 4, 5)
    assert not (tmp_path / "superseded").exists()
    text = (tmp_path / "lm_loss.csv").read_text()
    assert text.splitlines() == ["step,lm loss", "1,1", "2,1", "3,1", "4,4", "5,4"]
