"""Read files of torch.save from elsewhere without running any code of theirs.

Torch's own restricted unpickler refuses every class that is not named here, and what is named here
becomes a StandIn: an object that keeps attributes and has no behaviour. DeepSpeed and Megatron
need not be installed, and nothing of theirs is imported. Checksums, which torch writes but never
looks at, are compared.
"""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
)

from megatron_lite.checkpoint.errors import CheckpointError

DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
MEGATRON = (
    "megatron.core.enums.ModelType",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.legacy.model.enums.ModelType",
    "megatron.model.enums.ModelType",
)
NUMPY = tuple(
    f"{module}.{name}"
    for module, names in {
        "numpy": ("dtype", "ndarray"),
        "numpy.core.multiarray": ("_reconstruct", "scalar"),
        "numpy._core.multiarray": ("_reconstruct", "scalar"),
    }.items()
    for name in names
)
"""Of random states, which are not converted."""
OTHERS = ("_io.BytesIO", "builtins.getattr", "pathlib.PosixPath", "signal.Signals")
"""The first holds the scales of Transformer Engine before 2.0, which are not converted; by the
second Python before 3.11.4 stores a member of an enumeration, and nothing is looked up here."""
_READ_BYTES = 1 << 22


class StandIn:
    """An object of a foreign class: what it was made from and its attributes, nothing else."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


_ALLOWED: list[Any] = [
    argparse.Namespace,
    *((StandIn, name) for name in (*DEEPSPEED, *MEGATRON, *NUMPY, *OTHERS)),
]


@contextmanager
def _only_stand_ins() -> Iterator[None]:
    """Allow what is named here and nothing that other packages of this process have allowed."""
    others = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(_ALLOWED)
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(others)


def load(path: Path) -> dict[str, Any]:
    """A file's dictionary; its tensors stay on the disk until they are used.

    The format of torch before 1.6, which is no archive, is read into memory as a whole.
    CheckpointError where the file is missing, damaged or would run code.
    """
    try:
        archive = zipfile.is_zipfile(path)
        if archive:
            _compare_checksums(path)
        with _only_stand_ins():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the checkpoint is not whole") from None
    except Exception as error:  # a damaged file fails in any way inside torch
        refused = _refused(path, str(error)) if isinstance(error, pickle.UnpicklingError) else ""
        if not refused:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{path}: is no whole file of torch.save ({reason})") from error
        raise CheckpointError(
            f"{path}: refused, since loading it would run code of the file: {refused}. Nothing was "
            "run. If you trust whoever wrote it, load it there and save tensors, numbers and text "
            "only"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no dictionary but a {type(content).__name__}")
    return content


def _compare_checksums(path: Path) -> None:
    """BadZipFile, naming the record, where bytes of an archive have changed."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.CRC:  # torch.serialization.set_crc32_options can leave it out
                with archive.open(record) as file:
                    while file.read(_READ_BYTES):
                        pass


def _refused(path: Path, message: str) -> str:
    """The classes and functions that a file names beside the harmless ones; "" if none are."""
    try:
        with _only_stand_ins():
            names = sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # the older format, of which torch tells the first name only
        names = message.partition("GLOBAL ")[2].split()[:1]
    return ", ".join(names)
