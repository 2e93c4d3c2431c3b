"""What one rank finds out about itself, its files and its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.code_hash import code_hash
from megatron_lite.config.schema import RunConfig
from megatron_lite.health.preflight import folders
from megatron_lite.health.preflight.facts import (
    collect,
    config_hashes,
    settings,
)

CPU = torch.device("cpu")


def config(small_run: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(small_run | sections)


def test_the_codes_hash_is_that_of_names_and_contents(tmp_path: Path) -> None:
    """Not of where it lies, of what is compiled, or of other files."""
    hashes = []
    for number, name in enumerate("ab"):
        folder = tmp_path / name
        (folder / "inner").mkdir(parents=True)
        (folder / "one.py").write_text("x = 1\n")
        (folder / "inner/two.py").write_text("y = 2\n")
        (folder / f"one.cpython-{number}.pyc").write_text(name)
        hashes.append(code_hash(folder))
    assert hashes[0] == hashes[1]
    (tmp_path / "a/one.py").write_text("x = 2\n")
    (tmp_path / "b/one.py").rename(tmp_path / "b/other.py")
    assert len({hashes[0], *(code_hash(tmp_path / name) for name in "ab")}) == 3


def test_a_configs_hashes_differ_in_the_section_that_differs(small_run: dict[str, Any]) -> None:
    one = config_hashes(config(small_run))
    other = config_hashes(config(small_run, optimizer={"lr": 2e-3}))
    assert [name for name in one if one[name] != other[name]] == ["config section optimizer"]


def test_the_environment_that_counts() -> None:
    env = {"NCCL_IB_HCA": "mlx5", "HOME": "/root", "OMP_NUM_THREADS": "4", "SECRET_NCCL_KEY": "1"}
    assert settings(env) == {"NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "4"}


def test_all_facts_of_a_rank(small_run: dict[str, Any], tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    Path(f"{prefix}.bin").write_bytes(b"12345")
    (tmp_path / "old/global_step2").mkdir(parents=True)
    (tmp_path / "file").touch()
    run = config(
        small_run,
        data={"data_path": str(prefix)},
        checkpoint={"save": "saved", "load": "old"},
        deepspeed={
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": f"{tmp_path}/file/nvme"},
            }
        },
    )
    env = {"TORCH_EXTENSIONS_DIR": f"{tmp_path}/file/cache"}
    found = collect(run, run_dir=tmp_path, local_rank=3, device=CPU, env=env)
    assert found.must_agree[f"data.data_path {prefix}.bin"] == "5 bytes"
    assert found.must_agree[f"data.data_path {prefix}.idx"] == "not there"
    assert found.must_agree[f"checkpoint.load {tmp_path}/old"].startswith("1 entries")
    assert found.must_agree["torch"] == torch.__version__ and found.local_rank == 3
    assert found.free["run folder"] == pytest.approx(found.free["checkpoint.save"], rel=0.1)
    assert found.free["run folder"] > 0
    nvme = "deepspeed.zero_optimization.offload_optimizer.nvme_path"
    assert [text.split()[0] for text in found.faults] == [nvme]
    assert [text.split()[0] for text in found.doubts] == ["TORCH_EXTENSIONS_DIR"]
    assert "Not a directory" in found.faults[0] and str(tmp_path) in found.faults[0]


def test_a_folder_of_other_names_is_another_input(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    one = folders.describe_input(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert one != folders.describe_input(tmp_path) and one.startswith("1 entries")


def test_ranks_meet_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also above one that is not there yet, and by another path; who looks elsewhere is found."""
    monkeypatch.setattr(folders, "SETTLE", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "other").mkdir()
    path = tmp_path / "run/checkpoints"
    trial = folders.begin(folders.Folder("checkpoint.save", path), "token")
    assert folders.take_part(trial, path, 0) == ""
    assert folders.take_part(trial, tmp_path / "link/checkpoints", 1) == ""
    assert "is not the folder that rank 0 has" in folders.take_part(
        trial, tmp_path / "other/checkpoints", 2
    )
    assert "is not there" in folders.take_part(trial, tmp_path / "nowhere/checkpoints", 3)
    assert folders.unseen(trial, path, [0, 1]) == []
    assert folders.unseen(trial, path, [0, 1, 4]) == [4]
    folders.end(trial, path)
    assert sorted(p.name for p in tmp_path.glob("**/*")) == ["link", "other", "run"]
