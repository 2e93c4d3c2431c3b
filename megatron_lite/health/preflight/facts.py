"""Facts of one rank: where it runs, what it runs, and what it sees. Compared by comparison.py.

Nothing here is told to other ranks or judged, and nothing needs a process group.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

from megatron_lite.code_hash import DIGITS, code_hash
from megatron_lite.config.load import resolved_dict
from megatron_lite.config.schema import RunConfig
from megatron_lite.health.preflight.folders import (
    describe_input,
    free_space,
    inputs,
    own_folders,
    refuses,
)
from megatron_lite.rendezvous import node_name

PACKAGES = ("torch", "deepspeed", "numpy", "safetensors")
"""Whose versions decide what is computed, sent and saved."""
COMMUNICATION = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Prefixes of environment variables that all ranks should have alike."""
COMPUTATION = (
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)


@dataclass(frozen=True)
class Facts:
    """What one rank knows of itself; all JSON values."""

    node: str
    local_rank: int
    must_agree: dict[str, str] = field(default_factory=dict)
    """Name → value of what must be the same on all ranks, else the run ends."""
    should_agree: dict[str, str] = field(default_factory=dict)
    """The same for what is only worth a warning."""
    device: str = ""
    """Identity of its GPU; empty without one."""
    free: dict[str, int] = field(default_factory=dict)
    """Bytes left where a folder lies, by the folder's name."""
    faults: list[str] = field(default_factory=list)
    """What this rank by itself found to be wrong."""
    doubts: list[str] = field(default_factory=list)
    """The same for what is only worth a warning."""


def collect(
    config: RunConfig,
    *,
    run_dir: Path,
    local_rank: int,
    device: torch.device,
    env: Mapping[str, str],
) -> Facts:
    """The facts of this rank."""
    must, faults = {"python": platform.python_version(), **_versions()}, []
    try:
        must["code"] = code_hash(Path(__file__).parents[2])
    except OSError as error:
        faults.append(f"code {error.filename}: {error.strerror}")
    must |= config_hashes(config)
    must |= {name: describe_input(path) for name, path in inputs(config, run_dir).items()}
    about_device, identity = device_facts(device)
    cuda = {"CUDA of torch": str(torch.version.cuda), "kind of device": device.type}
    doubts: list[str] = []
    for folder in own_folders(config, env):
        if why := refuses(folder.path):
            (faults if folder.needed else doubts).append(f"{folder.name} {folder.path}: {why}")
    return Facts(
        node=node_name(env),
        local_rank=local_rank,
        must_agree=must | cuda,
        should_agree=about_device | settings(env),
        device=identity,
        free=free_space(config, run_dir, env),
        faults=faults,
        doubts=doubts,
    )


def config_hashes(config: RunConfig) -> dict[str, str]:
    """A hash of each section of the resolved config, so that a difference says where it is."""
    return {
        f"config section {name}": _hash(json.dumps(values, sort_keys=True))
        for name, values in resolved_dict(config).items()
    }


def settings(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how ranks compute and communicate."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(COMMUNICATION) or name in COMPUTATION
    }


def device_facts(device: torch.device) -> tuple[dict[str, str], str]:
    """What should be alike of all devices, and the identity of this one (empty for a CPU)."""
    if device.type != "cuda":
        return {}, ""
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "device": properties.name,
        "device memory": f"{properties.total_memory / 1e9:.1f} GB",
        "visible devices": str(torch.cuda.device_count()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }
    driver = Path("/sys/module/nvidia/version")
    if driver.is_file():
        facts["driver"] = driver.read_text().strip()
    return facts, str(properties.uuid)


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
