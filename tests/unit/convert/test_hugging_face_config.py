"""config.json as transformers writes it, against the run config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.config.load import load_config
from megatron_lite.config.schema import ModelConfig
from megatron_lite.convert.hugging_face_config import check
from tests.deepspeed_runs import VOCAB, Setup, network, section
from tests.distributed.models import write_config


def model(folder: Path, setup: Setup) -> ModelConfig:
    return load_config(write_config(folder / "run.json", folder, section(setup))).config.model


def saved(folder: Path, config: PreTrainedConfig, **changes: Any) -> Path:
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return folder / "config.json"


@pytest.mark.parametrize(
    "setup", [Setup(), Setup(tied=True, biases=True), Setup("gpt2")], ids=["llama", "tied", "gpt2"]
)
def test_the_same_model(tmp_path: Path, setup: Setup) -> None:
    path = saved(tmp_path, network(setup).config)
    check(path, model(tmp_path, setup), vocab_size=VOCAB)


def test_what_is_left_out_has_the_default_of_its_class(tmp_path: Path) -> None:
    """An empty file and one with every default are refused in the same words."""
    for setup, full in ((Setup(), LlamaConfig()), (Setup("gpt2"), GPT2Config())):
        said = []
        path = saved(tmp_path, full)
        for text in (path.read_text(), json.dumps({"model_type": full.model_type})):
            path.write_text(text)
            with pytest.raises(CheckpointError) as caught:
                check(path, model(tmp_path, setup), vocab_size=VOCAB)
            said.append(str(caught.value))
        assert said[0] == said[1]
        assert len(said[0].splitlines()) > 5


def test_every_difference_is_named(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}
    config = network(Setup()).config
    path = saved(tmp_path, config, num_key_value_heads=4, rms_norm_eps=1e-5, rope_parameters=rope)
    with pytest.raises(CheckpointError) as caught:
        check(path, model(tmp_path, Setup()), vocab_size=VOCAB)
    said = str(caught.value)
    assert "num_key_value_heads is 4, the run config's model has 2" in said
    assert "rms_norm_eps is 1e-05, the run config's model has 1e-06" in said
    assert "rope_theta is 9.0, the run config's model has 5000.0" in said
    assert "rope_type is linear: only the default is supported" in said
    assert len(said.splitlines()) == 5


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("llama", {"num_attention_heads": "4"}, "num_attention_heads is '4', not a whole number"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, not a whole number"),
        ("llama", {"hidden_size": None}, "hidden_size is None, not a whole number"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling is [1], no JSON object"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is linear: only"),
        ("llama", {"rope_theta": "a"}, "rope_theta is 'a', no number"),
        ("llama", {"rope_parameters": {"rope_theta": [1]}}, "rope_theta is [1], no number"),
        ("gpt2", {"n_embd": {}}, "n_embd is {}, not a whole number"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False, the run config's"),
    ],
)
def test_values_of_another_kind(tmp_path: Path, kind: str, values: Any, said: str) -> None:
    setup = Setup(kind)
    path = saved(tmp_path, network(setup).config)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(CheckpointError) as caught:
        check(path, model(tmp_path, setup), vocab_size=VOCAB)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.json: can't be read"):
        check(tmp_path / "absent.json", model(tmp_path, Setup()), vocab_size=VOCAB)
