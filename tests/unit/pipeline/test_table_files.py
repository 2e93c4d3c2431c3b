"""Tables from files: read as written, or refused with file, place and reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.pipeline.actions import ScheduleError
from megatron_lite.pipeline.greedy import arrange, empty_table, forwards_first
from megatron_lite.pipeline.plan import SchedulePlan
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule
from megatron_lite.pipeline.table_files import read_table, table_as_csv, table_as_json
from tests.random_tables import random_table

LEGAL: dict[str, Any] = {
    "micro_batches": 2,
    "placements": [[0, 1]],
    "actions": ["F0.0 F0.1 B0.0 B0.1", ["F1.0", "B1.0", "F1.1", "B1.1"]],
}
LEGAL_CSV = """micro-batches,2
placement,0,1
rank,F0.0,F0.1,,B0.0,,B0.1
rank,,F1.0,B1.0,F1.1,B1.1
"""

WRITERS = {"json": table_as_json, "csv": table_as_csv}


def written(tmp_path: Path, content: object) -> Path:
    if isinstance(content, str):
        path = tmp_path / "mine.csv"
        path.write_text(content)
    else:
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(content))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ScheduleError) as caught:
        read_table(path)
    return str(caught.value)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_named_schedule_comes_back_from_a_file(name: str, tmp_path: Path) -> None:
    virtual = 2 if SCHEDULES[name].chunks is None else None
    schedule = build_schedule(name, num_ranks=4, num_microbatches=8, virtual=virtual)
    path = tmp_path / "table.json"
    path.write_text(table_as_json(schedule))
    assert replace(read_table(path), name=name) == schedule
    assert replace(build_schedule(str(path), num_microbatches=8), name=name) == schedule


@pytest.mark.parametrize("suffix", WRITERS)
def test_random_tables_come_back_from_a_file(suffix: str, tmp_path: Path) -> None:
    for seed in range(40):
        schedule = random_table(seed, 1 + seed % 4)
        path = tmp_path / f"table.{suffix}"
        path.write_text(WRITERS[suffix](schedule))
        assert replace(read_table(path), name=schedule.name) == schedule


@pytest.mark.parametrize("suffix", WRITERS)
def test_two_directions_whose_ends_lie_apart_come_back(suffix: str, tmp_path: Path) -> None:
    """Neither way begins or ends on the first or on the last rank."""
    empty = empty_table("apart", ((1, 3, 0, 2), (2, 0, 3, 1)), (0, 1, 1, 0, 1, 1))
    schedule = arrange(empty, durations={"F": 1, "B": 2}, live=4, rule=forwards_first)
    path = tmp_path / f"apart.{suffix}"
    path.write_text(WRITERS[suffix](schedule))
    assert replace(read_table(path), name="apart") == schedule
    plan = SchedulePlan.of(str(path), num_ranks=4, num_microbatches=6)
    assert plan.bidirectional and plan.ends == (1, 2)


def test_json_and_csv_say_the_same(tmp_path: Path) -> None:
    from_json = read_table(written(tmp_path, LEGAL))
    from_csv = read_table(written(tmp_path, LEGAL_CSV))
    assert replace(from_csv, name=from_json.name) == from_json
    assert from_json.actions == build_schedule("1f1b", num_ranks=2, num_microbatches=2).actions


def test_the_examples_of_the_readme_are_read(tmp_path: Path) -> None:
    blocks = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8").split("```")
    as_json, as_csv = (
        next(block.strip("\n") for block in blocks if block.startswith(start))
        for start in ('\n{"micro_batches"', "\nmicro-batches")
    )
    assert json.loads(as_json) == LEGAL | {"actions": [LEGAL["actions"][0], "F1.0 B1.0 F1.1 B1.1"]}
    assert (
        read_table(written(tmp_path, as_csv)).actions
        == read_table(written(tmp_path, LEGAL)).actions
    )


def test_csv_with_two_directions_and_a_split_backward(tmp_path: Path) -> None:
    text = (
        "micro-batches,2\nplacement,0,1\nplacement,1,0\ndirections,0,1\n\n"
        "rank, F0.0, F1.1, B1.1, B0.0, W0.0, W1.1\nrank, F0.1, F1.0, B1.0, B0.1, W1.0, W0.1\n"
    )
    schedule = read_table(written(tmp_path, text))
    assert schedule.split_backward and schedule.placements == ((0, 1), (1, 0))
    assert schedule.directions == (0, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # what is wrong with the file
        ({"actions": ["F0.0 G0.1", "F1.0"]}, "mine.json: rank 0, action 1: 'G0.1' is not an"),
        ({"actions": ["F0.0 F0.1 B0.0 B0.1", ["F1.0", 3]]}, "rank 1, action 1: '3' is not an"),
        ({"actions": ["F0.0", 7]}, "actions[1] must be a list, not 7"),
        ({"actions": {}}, "actions must be a list"),
        ({"micro_batches": "2"}, 'micro_batches must be a whole number, not "2"'),
        ({"micro_batches": True}, "micro_batches must be a whole number, not true"),
        ({"micro_batches": 10**12}, "is for 1000000000000 micro-batches, but has only 8 actions"),
        ({"placements": []}, "needs a placement"),
        ({"placements": [0, 1]}, "placements[0] must be a list, not 0"),
        ({"placements": [[0, 1], [1, 0]]}, "needs directions"),
        ({"note": "mine", "speed": 3, "name": "x"}, "has unknown keys: name, speed"),
        # what the verifier has against the table
        ({"actions": ["F0.0 F0.1 B0.0", "F1.0 B1.0 F1.1 B1.1"]}, "B(stage 0, micro-batch 1) is m"),
        ({"actions": ["F0.0 F0.1 B0.1 B0.0", "F1.0 F1.1 B1.0 B1.1 B1.1"]}, "appears 2 times"),
        ({"actions": ["B0.0 F0.0 F0.1 B0.1", "F1.0 B1.0 F1.1 B1.1"]}, "whose result it needs"),
        ({"actions": ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"]}, "deadlock: rank 0 at B(s"),
        ({"actions": ["F0.0 F0.1 B0.0 B0.1 F1.0", "B1.0 F1.1 B1.1"]}, "its stage is on rank 1"),
        ({"actions": ["F0.0 F0.1 B0.0 B0.1 W0.0", "F1.0 B1.0 F1.1 B1.1"]}, "W(stage 0, micro-b"),
        ({"placements": [[0, 2]]}, "puts stage 1 on rank 2"),
        ({"directions": [0, 1]}, "micro-batch 1 has direction 1, but there are 1 placements"),
        ({"micro_batches": 3, "directions": [0, 0]}, "2 directions for 3 micro-batches"),
    ],
)
def test_a_faulty_table_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    said = refusal(written(tmp_path, LEGAL | change))
    assert reason in said and "mine.json" in said


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("F1.1", "F1,1", "rank 1, action 2: 'F1' is not an action"),
        ("micro-batches,2\n", "", "needs a line micro-batches with one number"),
        ("micro-batches,2", "micro-batches,two", "micro-batches must be whole numbers, not 'two'"),
        ("placement,0,1\n", "", "needs a placement"),
        ("placement", "place", "line 2 begins with 'place'; lines begin with"),
        ("placement,0,1", "micro-batches,2", "line 2: a second line of micro-batches"),
        (",B0.0,", ",", "B(stage 0, micro-batch 0) is missing"),
    ],
)
def test_a_faulty_csv_is_refused(old: str, new: str, reason: str, tmp_path: Path) -> None:
    said = refusal(written(tmp_path, LEGAL_CSV.replace(old, new)))
    assert reason in said and "mine.csv" in said


NO_TABLES = {
    "deep.json": ("[" * 100_000, "has too many lists, one in the other"),
    "digits.json": ('{"micro_batches": ' + "1" * 5000 + "}", "a number of 5000 digits is none"),
    "action.csv": (LEGAL_CSV.replace("F0.1", "F0." + "1" * 5000), "rank 0, action 1: 'F0.11"),
    "count.csv": (LEGAL_CSV.replace(",2", "," + "1" * 5000), "a number of 5000 digits is none"),
    "long.csv": (LEGAL_CSV + 'rank,"' + "F0.0," * 30_000, "line 5: field larger than"),
    "open.csv": (LEGAL_CSV.replace("rank,F", 'rank,"F'), "line 4: unexpected end of data"),
    "blank.csv": ("\n\n" + LEGAL_CSV.replace("placement", "place"), "line 4 begins with 'place'"),
    "arabic.csv": (LEGAL_CSV.replace("F0.0", "F\u0660.0"), "rank 0, action 0: 'F\u0660.0' is not"),
    "arabic2.csv": (LEGAL_CSV.replace(",0,1", ",\u0660,1"), "placement must be whole numbers"),
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_text_that_no_table_needs_is_refused(name: str, tmp_path: Path) -> None:
    """With the path, and with no more of the text than one can read."""
    content, reason = NO_TABLES[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    said = refusal(tmp_path / name)
    assert said.startswith(f"{tmp_path / name}: {reason}")
    assert len(said) < len(str(tmp_path)) + 300


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    """Spreadsheets write one in front of "CSV UTF-8"."""
    path = written(tmp_path, LEGAL_CSV)
    without = read_table(path)
    path.write_text(LEGAL_CSV, encoding="utf-8-sig")
    assert read_table(path) == without
    path = written(tmp_path, LEGAL)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert read_table(path).actions == without.actions


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    assert "must be an object" in refusal(tmp_path / "list.json")
    (tmp_path / "cut.json").write_text('{"micro_batches": 2,')
    assert "cut.json: line 1, column 21: " in refusal(tmp_path / "cut.json")
    (tmp_path / "twice.json").write_text('{"micro_batches": 2, "micro_batches": 3}')
    assert "gives a key twice" in refusal(tmp_path / "twice.json")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(tmp_path / "bytes.csv")
    (tmp_path / "lacks.json").write_text('{"actions": []}')
    assert "lacks micro_batches, placements" in refusal(tmp_path / "lacks.json")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"num_microbatches": 4}, "is for 2 micro-batches, but the run has 4"),
        ({"num_ranks": 4}, "is for 2 ranks, but the run has 4"),
        ({"num_stages": 3}, "is for 2 stages, but the run has 3"),
        ({"virtual": 2}, "is for 2 stages, but the run has 4"),
    ],
)
def test_a_table_is_for_one_size(asked: dict[str, int], reason: str, tmp_path: Path) -> None:
    path = written(tmp_path, LEGAL)
    with pytest.raises(ScheduleError) as caught:
        build_schedule(str(path), **({"num_microbatches": 2} | asked))  # type: ignore[arg-type]
    assert str(caught.value) == f"{path}: {reason}"
