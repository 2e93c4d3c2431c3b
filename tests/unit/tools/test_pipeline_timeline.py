"""tools/pipeline_timeline.py as a user starts it, and the pictures that it draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from megatron_lite.pipeline.picture import as_text, save_picture
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule
from megatron_lite.pipeline.simulate import Times, simulate

REPOSITORY = Path(__file__).resolve().parents[3]
SIZES = ("--stages", "4", "--micro-batches", "8")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/pipeline_timeline.py", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def facts(*arguments: object) -> dict[str, object]:
    ran = run(*arguments, "--json")
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    found = json.loads(ran.stdout)
    assert isinstance(found, dict)
    return found


def test_times_of_1f1b_and_of_a_message() -> None:
    """(8 + 3) slots of 30 ms; each message on the critical path adds its time."""
    found = facts("--schedule", "1f1b", *SIZES)
    assert found["makespan_ms"] == 330
    assert found["bubble_fraction"] == pytest.approx(3 / 11)
    assert found["peak_live_activations"] == [4, 3, 2, 1]
    assert found["idle_ms"] == [90] * 4
    slower = facts("--schedule", "gpipe", *SIZES, "--p2p-ms", 1)
    assert slower["makespan_ms"] == 336


def test_weights_are_half_of_the_backward_unless_told() -> None:
    """ZB-H1 is idle for (p - 1)(F + B - W), B the input's part."""
    half = facts("--schedule", "zb-h1", *SIZES, "--backward-ms", 20)
    assert half["idle_ms"] == [30] * 4
    less = facts("--schedule", "zb-h1", *SIZES, "--backward-ms", 20, "--weight-ms", 5)
    assert less["idle_ms"] == [60] * 4


def test_virtual_stages_take_their_part_of_the_time() -> None:
    found = facts("--schedule", "interleaved", *SIZES, "--virtual", 2)
    assert found["makespan_ms"] == 285 and found["stages"] == 8
    assert found["peak_live_activations"] == [11, 9, 7, 5]
    assert found["peak_live_in_1f1b_units"] == [5.5, 4.5, 3.5, 2.5]


def test_room_for_more_micro_batches_makes_chimera_quicker() -> None:
    usual = facts("--schedule", "chimera", "--stages", 8, "--micro-batches", 32)
    roomy = facts("--schedule", "chimera", "--stages", 8, "--micro-batches", 32, "--live", 32)
    assert (usual["makespan_ms"], roomy["makespan_ms"]) == (1080, 1050)


def test_text_picture_and_table_of_ranks() -> None:
    ran = run("--schedule", "1f1b", "--stages", 2, "--micro-batches", 2)
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    assert lines[:2] == ["1f1b: 2 ranks, 2 stages, 2 micro-batches", "step 90 ms, bubble 33.33%"]
    assert [line.split() for line in lines[-2:]] == [
        ["rank", r, "30", k, k] for r, k in ("02", "11")
    ]


def test_the_readme_has_the_figures_of_its_command() -> None:
    """All but the measured ones, which a benchmark prints."""
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| schedule | kept"))
    rows = [_cells(line) for line in lines[start : start + 2 + len(SCHEDULES)]]
    kept = [i for i, head in enumerate(rows[0]) if not head.endswith("measured")]
    ran = run("--compare", "--stages", 4, "--micro-batches", 8, 16)
    assert [[row[i] for i in kept] for row in rows] == [_cells(x) for x in ran.stdout.splitlines()]


def test_the_comparison_has_messages_too() -> None:
    """A gpipe of 4 stages and 8 micro-batches takes 330 ms, with messages of 1 ms 6 more."""
    sizes = ("--compare", "--stages", 4, "--micro-batches", 8)
    gpipe = [_cells(x) for x in run(*sizes, "--p2p-ms", 1).stdout.splitlines()][2]
    assert gpipe == ["gpipe", "8", "8", "27.3%", f"{1 - 240 / 336:.1%}"]


def test_sizes_that_some_schedules_refuse_leave_the_others() -> None:
    rows = [
        _cells(x) for x in run("--compare", "--stages", 3, "--micro-batches", 8).stdout.splitlines()
    ]
    refused = {row[0]: row[1] for row in rows[2:] if not row[-1]}
    assert list(refused) == ["interleaved", "chimera"]
    assert "even number of ranks, got 3" in refused["chimera"]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


@pytest.mark.parametrize("name", ["mine.json", "mine.csv"])
def test_a_table_that_was_written_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    made = facts("--schedule", "chimera", *SIZES, "--save-table", path)
    assert facts("--table", path) == made | {"schedule": str(path)}
    path.write_text(path.read_text().replace("B0.0", "", 1))
    refused = run("--table", path)
    assert refused.returncode == 2 and refused.stdout == ""
    assert name in refused.stderr and "B(stage 0, micro-batch 0) is missing" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--schedule", "chimera", "--stages", 3, "--micro-batches", 8), "even number of ranks"),
        (("--schedule", "1f1b", "--stages", 0, "--micro-batches", 8), "--stages: 0 is no whole"),
        (("--compare", "--stages", 4, "--micro-batches", 8, 0), "--micro-batches: 0 is no whole"),
        (("--schedule", "interleaved", *SIZES, "--virtual", "two"), "--virtual: two is no whole"),
        (("--schedule", "chimera", *SIZES, "--live", 0), "--live: 0 is no whole number of at"),
        (("--schedule", "1f1b"), "--stages and --micro-batches are needed"),
        (("--schedule", "1f1b", *SIZES, 16), "several --micro-batches are for --compare"),
        (("--table", "x.json", *SIZES), "are those of the table"),
        (("--compare", *SIZES, "--json"), "--compare prints a table and nothing else"),
        (("--schedule", "2f2b", *SIZES), "invalid choice"),
        (("--schedule", "1f1b", *SIZES, "--forward-ms", 0), "duration of F must be above 0"),
        (("--schedule", "zbv", *SIZES, "--forward-ms", "inf"), "inf is no time"),
        (("--schedule", "zbv", *SIZES, "--forward-ms", "abc"), "abc is no time: ms from 1e-09 to"),
        (("--schedule", "1f1b", *SIZES, "--backward-ms", "1e308"), "1e308 is no time: ms from"),
        (("--schedule", "1f1b", *SIZES, "--p2p-ms", "1e-300"), "1e-300 is no time: ms from"),
        (("--schedule", "zbv", *SIZES, "--weight-ms", 20), "must be below the whole of 20.0"),
        (("--schedule", "zbv", *SIZES, "--live", 3), "--live is for chimera"),
        (("--schedule", "chimera", *SIZES, "--live", 1), "needs room for 2 micro-batches"),
        (("--schedule", "1f1b", *SIZES, "--plot", "x.gif"), "ends in .svg or .png"),
        (("--schedule", "1f1b", *SIZES, "--save-table", "x.txt"), "ends in .json or .csv"),
        (("--table", "x.txt"), "x.txt: a table's name ends in .json or .csv"),
        (("--schedule", "1f1b", *SIZES, "--plot", "no/x.svg"), "no/x.svg: there is no folder no"),
        (("--schedule", "1f1b", *SIZES, "--save-table", "no/x.csv"), "there is no folder no"),
        (("--schedule", "zbv", "--stages", 10**6, "--micro-batches", 8), "16000000 parts to time"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[object, ...], words: str) -> None:
    ran = run(*arguments)
    assert ran.returncode == 2 and words in ran.stderr and "Traceback" not in ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_pictures_have_a_box_for_every_action(name: str, tmp_path: Path) -> None:
    virtual = 2 if SCHEDULES[name].chunks is None else None
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8, virtual=virtual)
    timeline = simulate(
        schedule, durations=Times().durations(split_backward=schedule.split_backward)
    )
    save_picture(tmp_path / "a.svg", schedule, timeline, "<title>")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    boxes = [e for e in root if e.tag.endswith("rect")][1:]
    actions = [timed for row in timeline.rows for timed in row]
    assert len(boxes) == len(actions)
    scale = float(boxes[0].attrib["width"]) / (actions[0].end - actions[0].start)
    for box, timed in zip(boxes, actions, strict=True):
        assert float(box.attrib["width"]) == pytest.approx(
            (timed.end - timed.start) * scale, abs=0.1
        )
    colours = {box.attrib["fill"] for box in boxes}
    assert len(colours) >= len(schedule.kinds) * schedule.num_microbatches
    assert "<title>" in [e.text for e in root]
    save_picture(tmp_path / "a.png", schedule, timeline, "title")
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (int(root.attrib["width"]), int(root.attrib["height"]))
        seen = {image.getpixel((x, y)) for x in range(66, image.width, 5) for y in (40, 73)}
    assert len(seen) > 10
    assert as_text(schedule, timeline, columns=200).count("\n") == 3


def test_the_text_picture_is_to_scale() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    timeline = simulate(schedule, durations={"F": 1.0, "B": 2.0})
    assert as_text(schedule, timeline, columns=7 + 36).splitlines() == [
        "rank 0 F0--F1--........B0------....B1------",
        "rank 1 ....F0--B0------F1--B1------........",
    ]
