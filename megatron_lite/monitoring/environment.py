"""What a run ran on: versions, code, launcher. For the text tab; reads no variable by itself.

Of the environment only the variables listed here are told, since others may hold secrets.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from megatron_lite.code_hash import code_hash

PACKAGES = (
    "megatron_lite",
    "torch",
    "deepspeed",
    "tensorboard",
    "numpy",
    "tokenizers",
    "sentencepiece",
)
VARIABLES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NODELIST",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "GLOO_SOCKET_IFNAME",
)
NCCL = ("NCCL_", "TORCH_NCCL_")
"""Beginnings of the names of variables that are told as well."""


def environment_facts(env: Mapping[str, str], device: torch.device) -> dict[str, str]:
    """Names and values, in the order in which they are shown."""
    facts = {**code_facts(), "python": platform.python_version()}
    facts |= {name: found for name in PACKAGES if (found := installed(name)) is not None}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["CUDA"] = str(torch.version.cuda)
        number = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["NCCL"] = ".".join(map(str, number))
    facts["platform"] = platform.platform()
    told = [name for name in VARIABLES if name in env]
    told += sorted(name for name in env if name.startswith(NCCL))
    return facts | {name: env[name] for name in told}


def installed(name: str) -> str | None:
    """Version of an installed package; None where there is none."""
    try:
        return str(distribution(name).version)
    except PackageNotFoundError:
        return None


def code_facts() -> dict[str, str]:
    """The git commit of this code, where git knows it, and a hash of its files."""
    package = Path(__file__).parents[1]
    facts = {"code hash": code_hash(package)}
    # A copy of the code in a run folder may lie in a repository that does not hold it.
    tracked = _git(package, "ls-files", "--", "monitoring/environment.py")
    if tracked and (commit := _git(package, "rev-parse", "HEAD")):
        changed = _git(package, "status", "--porcelain", "--", ".")
        facts["git commit"] = f"{commit}{' and uncommitted changes' if changed else ''}"
    return facts


def _git(folder: Path, *words: str) -> str:
    """What git says; nothing without git, outside a repository, and where it takes too long."""
    try:
        told = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()


def as_table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
