"""The text tab: what it tells of the environment, and that it tells no secrets."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from megatron_lite.monitoring import environment
from megatron_lite.monitoring.environment import as_table, code_facts, environment_facts

CPU = torch.device("cpu")


def test_versions_and_listed_variables_and_nothing_else() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "SLURM_JOB_ID": "17",
        "WANDB_API_KEY": "secret",
        "MY_NCCL_TOKEN": "secret",
        "PATH": "/secret",
    }
    facts = environment_facts(env, CPU)
    assert facts["torch"] == torch.__version__
    assert {"deepspeed", "python", "platform", "code hash"} <= facts.keys()
    assert facts["NCCL_DEBUG"] == "INFO" and facts["SLURM_JOB_ID"] == "17"
    assert facts["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert "secret" not in str(facts)


def test_the_code_is_told_by_commit_where_there_is_one_and_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "package/monitoring/environment.py"
    file.parent.mkdir(parents=True)
    file.write_text("a = 1\n")
    monkeypatch.setattr(environment, "__file__", str(file))
    plain = code_facts()
    assert "git commit" not in plain
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "package/.gitignore").write_text("copy\n")
    copied = file.parents[1] / "copy/monitoring/environment.py"
    copied.parent.mkdir(parents=True)
    copied.write_text("a = 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(environment, "__file__", str(copied))
        assert "git commit" not in code_facts(), "a copy that git does not know"
    (tmp_path / "package/.gitignore").unlink()
    copied.unlink()
    committed = code_facts()
    assert committed["code hash"] == plain["code hash"]
    assert len(committed["git commit"]) == 40
    file.write_text("a = 2\n")
    changed = code_facts()
    assert changed["code hash"] != plain["code hash"]
    assert changed["git commit"] == f"{committed['git commit']} and uncommitted changes"


def test_a_table_survives_bars_and_line_ends() -> None:
    table = as_table(("a", "b"), [("1|2", "x\ny")])
    assert table.splitlines() == ["| a | b |", "| --- | --- |", "| 1\\|2 | x y |"]
