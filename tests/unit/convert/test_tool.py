"""tools/convert_checkpoint.py as a user starts it: flags, exit codes, streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron_lite.convert.target import Target
from tests.distributed.models import LLAMA, write_config
from tests.megatron_checkpoints import Layout, write

REPOSITORY = Path(__file__).resolve().parents[3]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/convert_checkpoint.py", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def refused(ran: subprocess.CompletedProcess[str], said: str) -> None:
    assert ran.returncode == 2 and ran.stdout == ""
    assert said in ran.stderr and "Traceback" not in ran.stderr


def test_help_names_the_models() -> None:
    helped = run("--help")
    assert helped.returncode == 0
    for word in ("LlamaForCausalLM", "GPT2LMHeadModel", "checkpoint version 3.0", "weights only"):
        assert word in helped.stdout


def test_import_and_refusals(tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.json", tmp_path / "none", LLAMA)
    target = Target.read(config)
    values = {name: torch.ones(tensor.shape) for name, tensor in target.table.items()}
    write(tmp_path / "theirs", values, target.model, Layout("local", 2))
    there = ("--load", tmp_path / "theirs", "--save", tmp_path / "ours")

    done = run("--from", "megatron", *there, "--config", config)
    assert done.returncode == 0, done.stderr
    assert "global_step20" in done.stdout and "only weights are converted" in done.stdout
    refused(run("--from", "megatron", *there), "--from needs --config")
    refused(run("--from", "deepspeed", *there, "--config", config), "latest: missing")
    weights = ("--load", tmp_path / "ours", "--save", tmp_path / "universal")
    refused(run("--to", "deepspeed-universal", *weights), "holds weight alone")
    refused(run("--to", "deepspeed-universal", *weights, "--hugging-face-config", "x"), "no --hug")
    assert not (tmp_path / "universal").exists()


def test_a_faulty_config_is_shown_with_its_faults(tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.json", tmp_path, LLAMA | {"num_query_groups": 3})
    there = ("--load", tmp_path, "--save", tmp_path / "ours", "--config", config)
    refused(run("--from", "megatron", *there), "model.num_query_groups")
