"""Schedules in the config: names and files, and what they ask of ranks, layers and batches."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron_lite.config.load import load_config
from megatron_lite.config.rules import advice
from megatron_lite.config.rules.pipeline import num_stages
from megatron_lite.config.sections.parallel import ScheduleName
from megatron_lite.pipeline import table_files
from megatron_lite.pipeline.actions import Action
from megatron_lite.pipeline.schedules import SCHEDULES, build_schedule
from megatron_lite.pipeline.table_files import table_as_json
from megatron_lite.pipeline.verify import execution_order

SCHEDULE = "parallel.pipeline_schedule"
RANKS = "parallel.pipeline_model_parallel_size"
VIRTUAL = "parallel.virtual_pipeline_model_parallel_size"
LAYOUT = "parallel.pipeline_model_parallel_layout"


def run(name: str, pp: int, *, layers: int = 8, batch: int = 16, **more: Any) -> dict[str, Any]:
    """A run on `pp` ranks with `batch` / 2 micro-batches a step."""
    parallel = {"pipeline_schedule": name, "pipeline_model_parallel_size": pp, **more}
    return {
        "parallel": parallel,
        "model": {"num_layers": layers},
        "training": {"global_batch_size": batch},
    }


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table for 2 ranks and 8 micro-batches, beside the config."""
    path = tmp_path / "mine.json"
    path.write_text(table_as_json(build_schedule("zbv", num_ranks=2, num_microbatches=8)))
    return path


def test_the_schema_lists_the_names() -> None:
    assert get_args(ScheduleName) == tuple(SCHEDULES)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_name_is_accepted(load, name: str) -> None:
    virtual = {"virtual_pipeline_model_parallel_size": 2} if name == "interleaved" else {}
    loaded = load(run(name, 4, **virtual))
    assert loaded.config.parallel.pipeline_schedule == name


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (run("zbh1", 2), SCHEDULE, r'must be one of gpipe, .*\.csv\); did you mean "zb-h1"'),
        (run("mine.yaml", 2), SCHEDULE, r"must be one of gpipe, .*or a table's file"),
        (run("chimera", 3), SCHEDULE, r"needs an even .*, which is 3; use 2 or 4 ranks"),
        (run("chimera", 1), SCHEDULE, r"needs an even .*, which is 1; use 2 ranks"),
        (run("interleaved", 2), VIRTUAL, r'is required with "interleaved"; use 2 or more'),
        (
            run("interleaved", 2, virtual_pipeline_model_parallel_size=1),
            VIRTUAL,
            r'= 1: must be above 1 with "interleaved"; use 2 or more, or 1f1b',
        ),
        (
            run("zbv", 2, virtual_pipeline_model_parallel_size=3),
            VIRTUAL,
            r'= 3: must be 2 with "zbv"; leave it out',
        ),
        (
            run("1f1b", 2, virtual_pipeline_model_parallel_size=2),
            VIRTUAL,
            r'= 2: must be 1 with "1f1b"; leave it out',
        ),
        (run("1f1b", 4, layers=3), RANKS, r"= 4: must be at most model.num_layers 3"),
        (run("zbv", 4, layers=7), SCHEDULE, r"makes 8 stages on 4 ranks, more than .* 7"),
        (
            run("interleaved", 4, layers=11, virtual_pipeline_model_parallel_size=3),
            SCHEDULE,
            r"makes 12 stages on 4 ranks, more than model.num_layers 11; use fewer",
        ),
        (
            run("zbv", 2, pipeline_model_parallel_layout=[4, 4]),
            LAYOUT,
            r"entry for each stage \(pipeline_model_parallel_size 2, 4 stages in all\); it has 2",
        ),
        (
            run("interleaved", 4, batch=12, virtual_pipeline_model_parallel_size=2),
            "training.global_batch_size",
            r"= 12: makes 6 micro-batches .* interleaved needs a multiple of 4; .* 8 or 16",
        ),
        (
            run("chimera", 2, batch=6),
            "training.global_batch_size",
            r"= 6: makes 3 micro-batches a step, but chimera needs a multiple of 2; .* 4 or 8",
        ),
        (
            run("zb-h1", 1) | {"deepspeed": {"zero_optimization": {"stage": 3}}},
            SCHEDULE,
            r"cannot run with ZeRO stage 3.*use 1f1b or gpipe",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(problems, changes, path: str, words: str) -> None:
    found = problems(changes, world_size=changes["parallel"]["pipeline_model_parallel_size"])
    assert list(found) == [path]
    assert re.search(words, str(found[path])), found[path]


def test_batches_of_the_ramp_up_must_fit_too(problems, load) -> None:
    changes = run("chimera", 2)
    changes["training"]["rampup_batch_size"] = [4, 4, 100]
    load(changes, world_size=2)
    changes["training"]["rampup_batch_size"] = [4, 2, 100]
    (found,) = problems(changes, world_size=2).values()
    assert found.path == "training.rampup_batch_size"
    assert "makes 3 micro-batches a step, but chimera needs a multiple of 2" in found.rule


def test_more_replicas_make_fewer_micro_batches(problems, load) -> None:
    load(run("chimera", 2, batch=4), world_size=2)
    assert "makes 1 micro-batches" in str(problems(run("chimera", 2, batch=4), world_size=4))


def test_virtual_stages_make_more_stages(load) -> None:
    """virtual_pipeline_model_parallel_size: 3 stages on each of 2 ranks, in the table and here."""
    changes = run("interleaved", 2, virtual_pipeline_model_parallel_size=3)
    parallel = load(changes, world_size=2).config.parallel
    assert num_stages(load(changes, world_size=2).config) == 6
    schedule = build_schedule(
        parallel.pipeline_schedule,
        num_ranks=parallel.pipeline_model_parallel_size,
        num_microbatches=8,
        virtual=parallel.virtual_pipeline_model_parallel_size,
    )
    assert schedule.num_stages == 6


def test_recomputed_layers_are_those_of_a_stage(problems) -> None:
    changes = run("zbv", 2)
    changes["training"] |= {"recompute_granularity": "full", "recompute_num_layers": 3}
    found = problems(changes, world_size=2)["training.recompute_num_layers"]
    assert "at most the layers of a stage, 2" in found.rule


@pytest.mark.parametrize(
    ("name", "pp", "count", "idle"),
    [
        ("1f1b", 4, 8, "27%"),
        ("zb-h1", 4, 8, "11%"),
        # where no published formula holds: few micro-batches, a backward of two forwards
        ("zb-h1", 4, 2, "45%"),
        ("zbv", 4, 2, "43%"),
        ("zbv", 8, 8, "21%"),
        ("dualpipev", 4, 8, "6%"),
        ("chimera", 4, 2, "50%"),
        ("chimera", 8, 4, "57%"),
    ],
)
def test_the_advice_says_what_the_table_idles(
    load, name: str, pp: int, count: int, idle: str
) -> None:
    changes = run(name, pp, layers=2 * pp, batch=2 * count)
    (line,) = load(changes, world_size=pp).warnings
    assert f"{count} micro-batches for {pp} pipeline stages are few" in line
    assert f"stages idle {idle} of a step; global_batch_size {8 * pp} would give 4" in line


def test_no_advice_where_next_to_nothing_is_idle(load) -> None:
    assert load(run("chimera", 2, batch=8), world_size=2).warnings == []


def test_the_advice_of_a_large_table_names_the_tool(load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config is checked in less than a second; the table of zbv here has 98,000 actions."""
    monkeypatch.delattr(advice, "simulate_shares")
    changes = run("zbv", 64, layers=128, batch=2 * 255)
    (line,) = load(changes, world_size=64).warnings
    assert "stages idle for a share of a step that tools/pipeline_timeline.py tells;" in line


def test_a_table_of_a_file_is_advised_too_and_understood_once(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = build_schedule("1f1b", num_ranks=4, num_microbatches=8)
    (tmp_path / "mine.json").write_text(table_as_json(table))
    verified: list[str] = []
    monkeypatch.setattr(table_files, "verify", lambda table: verified.append(table.name))
    (line,) = load(run("mine.json", 4), world_size=4).warnings
    assert "stages idle 27% of a step; global_batch_size 32 with a table for 16 would give" in line
    assert verified == [str(tmp_path / "mine.json")]


def test_a_table_lies_beside_the_config_that_names_it(load, table: Path, tmp_path: Path) -> None:
    config = load(run("mine.json", 2), world_size=2).config
    assert config.parallel.pipeline_schedule == str(table)
    assert num_stages(config) == 4
    child = tmp_path / "inner" / "child.json"
    child.parent.mkdir()
    child.write_text(json.dumps({"extends": "../run.json"}))
    assert load_config(child, world_size=2).config == config


def test_a_table_given_by_set_is_relative_to_the_current_folder(
    load, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    override = f"{SCHEDULE}={tmp_path.name}/mine.json"
    loaded = load(run("1f1b", 2), world_size=2, overrides=[override])
    assert loaded.config.parallel.pipeline_schedule == str(table)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (run("mine.json", 4, batch=16), SCHEDULE, f"is a table for 2 ranks, but {RANKS} is 4"),
        (
            run("mine.json", 2, batch=32),
            "training.global_batch_size",
            "makes 16 micro-batches a step, but TABLE is a table for 8; use batches of 16",
        ),
        (run("mine.json", 2, layers=3), SCHEDULE, "makes 4 stages on 2 ranks, more than"),
        (
            run("mine.json", 2, virtual_pipeline_model_parallel_size=2),
            VIRTUAL,
            "has no effect with a table; leave it out",
        ),
        (run("other.json", 2), SCHEDULE, "is no table that can run: No such file or directory"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    problems, changes, path: str, words: str, table: Path
) -> None:
    found = problems(changes, world_size=changes["parallel"]["pipeline_model_parallel_size"])
    assert list(found) == [path]
    assert words.replace("TABLE", str(table)) in str(found[path])


def test_a_table_that_cannot_run_is_refused_with_the_reason(problems, table: Path) -> None:
    table.write_text(table.read_text().replace("B0.3 ", ""))
    (found,) = problems(run("mine.json", 2), world_size=2).values()
    assert found.path == SCHEDULE
    assert found.rule == "is no table that can run: rank 0: B(stage 0, micro-batch 3) is missing"


def test_text_that_is_no_table_is_a_problem_of_the_config(problems, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (found,) = problems(run("deep.json", 2), world_size=2).values()
    assert found.path == SCHEDULE
    assert found.rule == "is no table that can run: has too many lists, one in the other"


def test_a_ramp_up_cannot_run_on_a_table(problems, table: Path) -> None:
    changes = run("mine.json", 2)
    changes["training"]["rampup_batch_size"] = [4, 4, 100]
    (found,) = problems(changes, world_size=2).values()
    assert found.path == "training.rampup_batch_size"
    assert "makes 2 micro-batches a step" in found.rule


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipev"])
def test_split_backwards_are_not_compiled(load, problems, name: str) -> None:
    changes = run(name, 2)
    changes["training"]["compile"] = True
    found = problems(changes, world_size=2)["training.compile"]
    assert found.rule.startswith(f"cannot run with {SCHEDULE} {name}")


def test_two_ways_of_a_table_are_mirrored(load, problems, tmp_path: Path) -> None:
    """Chimera's own table is accepted; with its second direction like the first it is not."""
    table = build_schedule("chimera", num_ranks=4, num_microbatches=8)
    path = tmp_path / "two.json"
    path.write_text(table_as_json(table))
    load(run(str(path), 4), world_size=4)
    same = replace(table, placements=(table.placements[0], table.placements[0]))
    rows: list[list[Action]] = [[] for _ in range(4)]
    for _, action in execution_order(table):
        rows[same.rank_of(action.stage, action.micro_batch)].append(action)
    path.write_text(table_as_json(replace(same, actions=tuple(map(tuple, rows)))))
    (found,) = problems(run(str(path), 4), world_size=4).values()
    assert "rank 0 and its mirror image, rank 3, must be two ranks" in found.rule


def test_a_table_without_a_stage_for_a_rank_is_refused(problems, tmp_path: Path) -> None:
    table = build_schedule("1f1b", num_ranks=2, num_microbatches=8)
    path = tmp_path / "idle.json"
    path.write_text(table_as_json(replace(table, num_ranks=3, actions=(*table.actions, ()))))
    (found,) = problems(run(str(path), 3), world_size=3).values()
    assert "gives rank 2 no stage" in found.rule
