"""A resumed run continues its curves on two stages: every step once, and nothing is lost."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lite.config.load import load_config
from megatron_lite.mpu.grid import Grid
from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.progress import Progress
from megatron_lite.report import Reporter, Speed
from megatron_lite.stage_report import StageReport
from tests.distributed.models import write_corpus
from tests.distributed.small import small_config
from tests.resumed import END, FIRST_END, SAMPLES, SAVED, rows_of

STEPS = list(range(1, END + 1))
RANGES = {"data": 1, "forward": SAMPLES, "backward": SAMPLES, "optimizer": 1}
VALIDATIONS = [step for step in STEPS if step % 2 == 0]


def board(run_dir: Path) -> EventAccumulator:
    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return reader


def test_b52_metrics_have_every_step_once_and_keep_the_rest_apart(resumed: Path) -> None:
    rows = rows_of(resumed / "metrics.jsonl")
    steps = {
        event: [row["iteration"] for row in rows if row["event"] == event]
        for event in ("train", "valid", "test", "save", "load")
    }
    assert steps["train"] == STEPS and steps["valid"] == VALIDATIONS
    assert (steps["test"], steps["load"]) == ([END], [SAVED])
    assert steps["save"] == [4, 8, 12, 14]
    aside = rows_of(resumed / "metrics.superseded.jsonl")
    assert aside[0] == {"event": "superseded", "iteration": SAVED}
    lost = [row["iteration"] for row in aside if row["event"] == "train"]
    assert lost == list(range(SAVED + 1, FIRST_END + 1))
    assert {row["event"] for row in aside[1:]} == {"train", "valid", "test", "save"}
    assert f"{len(aside) - 1} rows of" in (resumed / "second.txt").read_text()


def test_b52_tensorboard_and_csv_files_show_the_same_steps(resumed: Path) -> None:
    reader = board(resumed)
    rows = rows_of(resumed / "metrics.jsonl")
    losses = [row["lm_loss"] for row in rows if row["event"] == "train"]
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        steps = STEPS
        if "validation" in tag:
            steps = VALIDATIONS
        elif "test" in tag:
            steps = [END]
        if tag.endswith(" vs samples"):
            steps = [SAMPLES * step for step in steps]
        assert [event.step for event in events] == steps, tag
        with (resumed / "csv" / f"{tag.replace(' ', '_').replace('/', '_')}.csv").open() as file:
            head, *lines = csv.reader(file)
        assert head == ["step", tag.rpartition("/")[2]]  # DeepSpeed cuts at the slash
        assert [int(step) for step, _ in lines] == steps, tag
        if tag.removesuffix(" vs samples") == "lm loss":
            assert [float(value) for _, value in lines] == losses
    aside = (resumed / "csv/superseded/lm_loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in aside] == ["5", "6", "7", "8", "9", "10"]


def test_a_run_that_goes_back_in_one_process_has_every_step_once(
    tmp_path: Path,
) -> None:
    config = small_config(
        tmp_path / "run.json", write_corpus(tmp_path / "c"), logging={"tensorboard_dir": "board"}
    )
    plan = SchedulePlan.of("1f1b", num_ranks=1, num_microbatches=1)
    report = Reporter(
        load_config(config).config,
        run_dir=tmp_path,
        progress=Progress(),
        speed=Speed(16, 1, 1, None),
        stages=StageReport(plan, Grid(), torch.device("cpu"), 1),
        rank=0,
        device=torch.device("cpu"),
    )
    for event, first, last in (("valid", 1, 6), ("rewind", 3, 3), ("valid", 4, 8)):
        for step in range(first, last + 1):
            now = Progress(iteration=step, consumed_samples=SAMPLES * step)
            if event == "rewind":
                report.rewind(now)
            else:
                report.evaluation("valid", now, loss=float(first), seconds=0.1)
    report.close()
    losses = [1, 1, 1, 4, 4, 4, 4, 4]
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert [row["lm_loss"] for row in rows] == losses
    reader = EventAccumulator(str(tmp_path / "board"))
    reader.Reload()
    for tag in ("lm loss validation", "lm loss validation vs samples"):
        assert [event.value for event in reader.Scalars(tag)] == losses


def test_the_text_tab_has_config_environment_and_layout_of_each_start(resumed: Path) -> None:
    reader = board(resumed)
    texts = {}
    for tag in ("config", "environment", "layout"):
        events = reader.Tensors(f"{tag}/text_summary")
        assert [event.step for event in events] == [0, SAVED]
        texts[tag] = events[-1].tensor_proto.string_val[0].decode()
    fenced = texts["config"].removeprefix("```json\n").removesuffix("\n```")
    assert json.loads(fenced) == json.loads((resumed / "config.json").read_text())
    assert "| WORLD_SIZE | 2 |" in texts["environment"]
    first, second = texts["layout"].splitlines()[2:]
    assert first.startswith("| 0 |") and second.startswith("| 1 |")
    assert first.endswith(" | 0 | 0 | 0 | stage 0: embedding, layers.0 |")
    assert " | 0 | 0 | 1 | stage 1: layers.1, final_norm" in second


def test_the_chosen_rank_alone_leaves_a_trace(resumed: Path) -> None:
    """The second start begins behind the window and records nothing."""
    (path,) = (resumed / "profile").iterdir()
    assert path.name == "rank1_iterations3-3.pt.trace.json.gz"
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    assert trace["distributedInfo"]["rank"] == 1
    names = [event.get("name") for event in trace["traceEvents"] if event.get("ph") == "X"]
    for name, times in RANGES.items():
        assert names.count(name) == times, name


def test_the_start_of_a_run_says_how_to_look_at_its_curves(resumed: Path) -> None:
    command = f"tensorboard --logdir {resumed / 'tensorboard'}"
    assert command in (resumed / "first.txt").read_text()
