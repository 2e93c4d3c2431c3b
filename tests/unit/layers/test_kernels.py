"""NVIDIA's apex is told from the other package of that name, and used only where it can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.layers.kernels import apex_status, norm_function


def fake_package(folder: Path, *files: str) -> None:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_the_other_apex_is_recognised(on_path: Path) -> None:
    fake_package(on_path, "apex/__init__.py", "apex/lib.py")
    assert apex_status() == "the installed package named apex is not NVIDIA's"


def test_apex_without_its_extension_is_not_used(on_path: Path) -> None:
    fake_package(on_path, "apex/__init__.py", "apex/normalization/fused_layer_norm.py")
    assert apex_status() == "installed without its CUDA extension fused_layer_norm_cuda"


def test_apex_with_its_extension_is_used_on_cuda_alone(on_path: Path) -> None:
    fake_package(
        on_path,
        "apex/__init__.py",
        "apex/normalization/fused_layer_norm.py",
        "fused_layer_norm_cuda.py",
    )
    assert apex_status() == "active"
    on_cuda = {norm_function(kind, torch.device("cuda")) for kind in ("LayerNorm", "RMSNorm")}
    on_cpu = {norm_function(kind, torch.device("cpu")) for kind in ("LayerNorm", "RMSNorm")}
    assert len(on_cuda) == len(on_cpu) == 2
    assert not on_cuda & on_cpu
