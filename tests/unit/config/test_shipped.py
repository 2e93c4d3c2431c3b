"""Every shipped config loads, and the committed schema is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.config.json_schema import json_schema, main, schema_text
from megatron_lite.config.load import load_config
from megatron_lite.config.suggest import configuration_objects

CONFIGS = Path(__file__).parents[3] / "configs"
RUNS = sorted((CONFIGS / "run").glob("*.json"))
MODELS = sorted((CONFIGS / "model").glob("*.json"))
REST_OF_A_RUN = [
    "training.micro_batch_size=1",
    "training.global_batch_size=1",
    "training.train_iters=1",
    "optimizer.lr=1e-3",
    "data.data_path=corpus",
]


def test_there_are_shipped_configs() -> None:
    assert {path.name for path in RUNS} >= {"quickstart.json", "laptop.json"}
    assert {path.name for path in MODELS} >= {"gpt2-125m.json", "gpt3-175b.json", "llama-7b.json"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_run_loads_without_a_warning(path: Path) -> None:
    assert load_config(path).warnings == []


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_completes_a_run(path: Path) -> None:
    assert set(json.loads(path.read_text())) == {"$schema", "_note", "model"}
    load_config(path, [*REST_OF_A_RUN, "data.tokenizer_type=ByteTokenizer"])


def test_quickstart_layout() -> None:
    loaded = load_config(CONFIGS / "run/quickstart.json")
    cfg = loaded.config
    assert loaded.world_size == 4 and loaded.data_parallel_size == 1
    assert cfg.precision.dtype == "fp16"
    zero = cfg.deepspeed.zero_optimization
    assert (zero.stage, zero.offload_optimizer.device) == (2, "cpu")
    assert cfg.data.data_path == str(CONFIGS.parent / "data/quickstart/corpus_text_document")
    assert cfg.data.tokenizer_model == str(CONFIGS.parent / "data/quickstart/tokenizer.model")


def test_gpt3_layout() -> None:
    loaded = load_config(CONFIGS / "run/gpt3-175b-64x4x8.json")
    sizes = loaded.config.parallel
    assert loaded.data_parallel_size == 64
    assert (sizes.pipeline_model_parallel_size, sizes.tensor_model_parallel_size) == (4, 8)


def test_committed_schema_is_current(tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "schema.json")])
    written = (tmp_path / "schema.json").read_text(encoding="utf-8")
    assert written == schema_text()
    message = "run python -m megatron_lite.config.json_schema --out configs/schema.json"
    assert (CONFIGS / "schema.json").read_text(encoding="utf-8") == written, message


def test_every_field_is_documented_in_the_schema() -> None:
    schema = json_schema()
    for path, section in configuration_objects():
        part = schema if not path else schema["$defs"][section.__name__]
        assert part["additionalProperties"] is False
        for name, field in section.model_fields.items():
            assert field.description, f"{path}.{name}"
            assert "description" in part["properties"][name] or "$ref" in part["properties"][name]


@pytest.mark.parametrize("path", [*RUNS, *MODELS], ids=lambda path: path.stem)
def test_shipped_configs_name_the_schema(path: Path) -> None:
    named = json.loads(path.read_text())["$schema"]
    assert (path.parent / named).resolve() == CONFIGS / "schema.json"


def test_readme_lists_every_file() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    for path in [*RUNS, *MODELS]:
        assert f"`{path.relative_to(CONFIGS)}`" in text
