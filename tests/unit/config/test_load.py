"""Composing files and overrides, unknown keys, origins, and that every fault comes in one pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.config.errors import ConfigError
from megatron_lite.config.load import load_config, resolved_dict


def write(path: Path, values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(values if isinstance(values, str) else json.dumps(values, indent=1))
    return path


def refusal(path: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_nulls_become_numbers(load) -> None:
    loaded = load({"model": {"swiglu": True, "ffn_hidden_size": None}})
    cfg = loaded.config
    assert cfg.model.ffn_hidden_size == 128
    assert cfg.model.kv_channels == 8
    assert cfg.model.num_query_groups == 8
    assert cfg.model.max_position_embeddings == 32
    assert cfg.model.add_qkv_bias is True
    assert cfg.training.eval_micro_batch_size == 2
    assert cfg.optimizer.lr_decay_iters == 10
    assert cfg.checkpoint.exit_on_missing_checkpoint is False
    assert cfg.launch.gpus_per_node == 1
    assert loaded.origins["model.ffn_hidden_size"] == "derived"


@pytest.mark.parametrize(
    ("hidden", "swiglu", "ffn"),
    [(768, False, 3072), (64, True, 128), (8, True, 64), (4096, True, 10880)],
)
def test_default_ffn_hidden_size(load, hidden: int, swiglu: bool, ffn: int) -> None:
    cfg = load({"model": {"hidden_size": hidden, "swiglu": swiglu}}).config
    assert cfg.model.ffn_hidden_size == ffn


def test_files_extend_each_other_and_set_wins(tmp_path: Path, small_run) -> None:
    base = small_run
    base["training"]["train_iters"] = 99
    write(tmp_path / "parts/base.json", base)
    write(tmp_path / "parts/wide.json", {"_note": "wider", "model": {"hidden_size": 128}})
    top = {"extends": ["parts/base.json", "parts/wide.json"], "training": {"train_iters": 7}}
    run = write(tmp_path / "run.json", top)
    loaded = load_config(run, ["optimizer.lr=2e-4", "precision.dtype=fp16"])
    cfg, origins = loaded.config, loaded.origins
    assert cfg.model.hidden_size == 128 and origins["model.hidden_size"].endswith("wide.json:4")
    assert cfg.model.num_layers == 4 and "base.json:" in origins["model.num_layers"]
    assert cfg.training.train_iters == 7 and "run.json:" in origins["training.train_iters"]
    assert cfg.optimizer.lr == 2e-4 and origins["optimizer.lr"] == "--set"
    assert cfg.precision.dtype == "fp16"
    assert origins["training.seed"] == "default"
    assert cfg.data.data_path == str(tmp_path / "parts/corpus")


def test_set_takes_objects_lists_and_words(load) -> None:
    overrides = [
        'deepspeed.zero_optimization={"stage": 2}',
        'data.data_path=[0.5, "a", 0.5, "b"]',
        "logging.tensorboard_dir=null",
        "checkpoint.save=out",
        "training.seed=1",
        "training.seed=2",
    ]
    loaded = load(overrides=overrides)
    cfg, here = loaded.config, Path.cwd()
    assert cfg.deepspeed.zero_optimization.stage == 2
    assert cfg.data.data_path == (0.5, str(here / "a"), 0.5, str(here / "b"))
    assert cfg.logging.tensorboard_dir is None
    assert cfg.checkpoint.save == "out"
    assert cfg.training.seed == 2
    assert loaded.origins["deepspeed.zero_optimization.stage"] == "--set"


@pytest.mark.parametrize("bad", ["training.seed", "=3", "a..b=1", "extends=x.json", 'a.b={"c":'])
def test_malformed_set_is_refused(problems, bad: str) -> None:
    assert any("--set" in path for path in problems(overrides=[bad]))


def test_cycle_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"extends": "b.json"})
    write(tmp_path / "b.json", {"extends": "a.json"})
    message = refusal(tmp_path / "a.json")
    assert "extends itself" in message and message.count("a.json") >= 2


def test_one_base_may_be_reached_twice(tmp_path: Path, small_run) -> None:
    write(tmp_path / "base.json", small_run)
    write(tmp_path / "a.json", {"extends": "base.json"})
    write(tmp_path / "b.json", {"extends": ["base.json", "a.json"]})
    assert load_config(tmp_path / "b.json").config.model.num_layers == 4


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ('{\n "model": {\n  "num_layers": 4,\n }\n}', "run.json:4:2", "comma"),
        ('{\n // no\n "model": {}}', "run.json:2:2", "_note"),
        ("{'model': 1}", "run.json:1:2", "double quotes"),
        ("", "run.json:1:1", ""),
    ],
)
def test_text_that_is_not_json(tmp_path: Path, text: str, place: str, hint: str) -> None:
    message = refusal(write(tmp_path / "run.json", text))
    assert place in message and hint in message


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    run = write(tmp_path / "run.json", {"extends": "modell.json"})
    write(tmp_path / "model.json", {})
    message = refusal(run)
    assert (
        "modell.json" in message and "No such file" in message and "model.json, run.json" in message
    )


def test_all_unreadable_parents_are_named(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "run.json", {"extends": ["x.json", "y.json"]}))
    assert "x.json" in message and "y.json" in message


def test_b56_duplicate_keys_name_path_and_lines(tmp_path: Path, small_run) -> None:
    text = json.dumps(small_run, indent=1).replace(
        '"hidden_size": 64,', '"hidden_size": 64,\n  "hidden_size": 65,'
    )
    message = refusal(write(tmp_path / "run.json", text))
    assert "model.hidden_size: is given twice, on lines 4 and 5 of" in message


@pytest.mark.parametrize(
    ("changes", "path", "suggestion"),
    [
        ({"modle": {}}, "modle", 'did you mean "model"?'),
        ({"model": {"num_layer": 3}}, "model.num_layer", 'did you mean "num_layers"?'),
        ({"model": {"lr": 3}}, "model.lr", 'this key belongs in section "optimizer"'),
        ({"training": {"hidden_sise": 3}}, "training.hidden_sise", "model.hidden_size"),
        ({"lr": 1}, "lr", 'this key belongs in section "optimizer"'),
        ({"precision": {"bf16": True}}, "precision.bf16", "use precision.dtype"),
        (
            {"deepspeed": {"gradient_clipping": 1.0}},
            "deepspeed.gradient_clipping",
            "use training.clip_grad",
        ),
        (
            {"deepspeed": {"train_batch_size": 8}},
            "deepspeed.train_batch_size",
            "use training.global_batch_size",
        ),
        ({"deepspeed": {"data_types": {}}}, "deepspeed.data_types", "precision.dtype"),
        ({"deepspeed": {"optimizer": {}}}, "deepspeed.optimizer", 'section "optimizer"'),
        ({"deepspeed": {"scheduler": {}}}, "deepspeed.scheduler", "section optimizer"),
        ({"deepspeed": {"fp16": {}}}, "deepspeed.fp16", "use precision.dtype"),
        (
            {"deepspeed": {"zero_optimization": {"stages": 2}}},
            "deepspeed.zero_optimization.stages",
            'did you mean "stage"?',
        ),
        (
            {"deepspeed": {"zero_optimization": {"cpu_offload": True}}},
            "deepspeed.zero_optimization.cpu_offload",
            "offload_optimizer",
        ),
        (
            {"optimizer": {"lr_batch_scaling": {"rule": "sqrt", "base": 8}}},
            "optimizer.lr_batch_scaling.base",
            "base_global_batch_size",
        ),
    ],
)
def test_b56_unknown_keys(problems, changes, path: str, suggestion: str) -> None:
    problem = problems(changes)[path]
    assert "is not a key of" in problem.rule and suggestion in problem.suggestion
    assert "run.json:1" in problem.origin


def test_b56_notes_are_allowed_everywhere_and_carry_nothing(load, problems) -> None:
    noted = {"_note": ["a", "b"], "model": {"_note": "c"}, "deepspeed": {"aio": {"_note": "d"}}}
    assert load(noted).config == load().config
    assert "model._note" in problems({"model": {"_note": {"hidden_size": 3}}})


def test_b56_resolved_config_gives_the_same_run(load, tmp_path: Path) -> None:
    changes = {
        "model": {"swiglu": True, "num_query_groups": 4},
        "parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_layout": [1, 3]},
        "training": {"train_iters": ..., "train_samples": 1000, "rampup_batch_size": [8, 4, 100]},
        "optimizer": {"lr_batch_scaling": {"rule": "sqrt", "base_global_batch_size": 8}},
        "precision": {"dtype": "fp16", "loss_scale": 128},
        "data": {"data_path": [0.7, "a", 0.3, "b"]},
        "checkpoint": {"load": "x"},
    }
    changes["parallel"]["pipeline_model_parallel_size"] = 2
    first = load(changes, world_size=8)
    again = write(tmp_path / "elsewhere/config.json", resolved_dict(first.config))
    second = load_config(again, world_size=8)
    assert second.config == first.config
    assert resolved_dict(second.config) == resolved_dict(first.config)


def test_every_fault_in_one_pass(tmp_path: Path, small_run) -> None:
    """A faulty field hides neither its neighbours nor the rules on sound fields."""
    values = small_run
    values["model"] |= {"num_attention_heads": 6, "hidden_size": "64", "colour": 1}
    values["parallel"] = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    values["training"] |= {"seed": None, "global_batch_size": 7, "train_samples": 5}
    values["optimizer"] = {"min_lr": 1}
    values["deepspeed"] = {"zero_optimization": {"stage": 3}}
    values["data"]["split"] = "0,0,0"
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "run.json", values), ["launch.nodes=x"], world_size=8)
    found = {problem.path for problem in caught.value.problems}
    assert found == {
        "model.hidden_size",
        "model.colour",
        "training.seed",
        "optimizer.lr",
        "data.split",
        "launch.nodes",
        "parallel.tensor_model_parallel_size",
        "training.train_iters",
        "training.train_samples",
        "training.global_batch_size",
        "deepspeed.zero_optimization.stage",
    }


def test_problem_names_path_value_rule_and_nearest_value(problems) -> None:
    text = str(problems({"training": {"global_batch_size": 7}})["training.global_batch_size"])
    assert "training.global_batch_size = 7: must be a multiple of" in text
    assert "2 x 1 = 2" in text and "use 6 or 8" in text and "run.json:1" in text


def test_missing_required_keys_are_all_named(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "run.json", {}))
    for key in (
        "model.num_layers",
        "model.seq_length",
        "training.micro_batch_size",
        "optimizer.lr",
    ):
        assert f"{key}: is required" in message
    assert "data.data_path: is required" in message


def test_files_are_looked_for_only_on_request(load, problems, tmp_path: Path) -> None:
    load()
    assert "corpus.bin" in problems(check_files=True)["data.data_path"].rule
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus{end}").touch()
    load(check_files=True)


def test_loading_is_quick_and_imports_no_torch(tmp_path: Path, small_run) -> None:
    run = write(tmp_path / "run.json", small_run)
    code = (
        "import sys; from megatron_lite.config.load import load_config; "
        "from megatron_lite.config.render import render_resolved; "
        f"render_resolved(load_config({str(run)!r})); "
        "assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}

    def seconds() -> float:
        """Of processor time, which other work on the machine does not lengthen much."""
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert min(seconds() for _ in range(3)) < 1.0
