"""Files that would run code, or are none of torch.save's, are refused with a word on why."""

from __future__ import annotations

import os
import pickle
import random
from argparse import Namespace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.serialization import get_safe_globals, safe_globals

from megatron_lite.checkpoint.errors import CheckpointError
from megatron_lite.convert.torch_files import StandIn, load


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_never_run(tmp_path: Path, zipped: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    content = {"args": Namespace(a=Evil(marker)), "model": torch.ones(2)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="refused, since loading it would run code") as caught:
        load(path)
    assert not marker.exists()
    assert str(path) in str(caught.value)
    assert "posix.system" in str(caught.value)
    torch.load(path, weights_only=False)
    assert marker.exists(), "the file was harmless"


def test_a_plain_pickle_is_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps(Evil(marker), protocol=2))
    with pytest.raises(CheckpointError, match=r"evil\.pt"):
        load(path)
    assert not marker.exists()


def test_an_allowed_name_gives_no_access_to_the_class(tmp_path: Path) -> None:
    """What is allowed by name is an object without behaviour, whatever the file passes to it."""
    path = tmp_path / "states.pt"
    content = {"numpy": np.random.get_state(), "random": random.getstate(), "te": BytesIO(b"ab")}
    torch.save(content, path)
    loaded = load(path)
    for kept in (loaded["numpy"][1], loaded["te"]):
        assert type(kept) is StandIn and vars(kept).keys() <= {"args"}


def test_what_others_allow_is_not_allowed_here(tmp_path: Path) -> None:
    """Megatron-core and others let torch load NumPy's and their own classes as they are."""
    path = tmp_path / "states.pt"
    torch.save({"numpy": np.random.get_state()}, path)
    theirs = [type(np.dtype("uint32")), np.ndarray, np.dtype, np.empty(0).__reduce__()[0]]
    with safe_globals(theirs):
        assert type(load(path)["numpy"][1]) is StandIn
        assert set(get_safe_globals()) >= set(theirs)


class Member:
    """Of an enumeration, as Python before 3.11.4 stores it: as a look-up by name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Namespace, "mro")


def test_nothing_is_looked_up(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    torch.save({"stage": Member()}, path)
    stage = load(path)["stage"]
    assert type(stage) is StandIn and stage.args == (Namespace, "mro")


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing; the checkpoint is not whole"):
        load(tmp_path / "absent.pt")
    path = tmp_path / "list.pt"
    torch.save([1], path)
    with pytest.raises(CheckpointError, match="holds no dictionary but a list"):
        load(path)
    torch.save({"a": torch.ones(10_000)}, path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"is no whole file of torch\.save"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is no whole file of torch\.save"):
        load(path)


def test_a_byte_that_changed_is_seen(tmp_path: Path) -> None:
    """Torch itself writes checksums and reads past them."""
    path = tmp_path / "states.pt"
    torch.save({"weight": torch.zeros(4096)}, path)
    raw = bytearray(path.read_bytes())
    raw[raw.find(bytes(8192)) + 4096] ^= 1
    path.write_bytes(raw)
    assert torch.load(path)["weight"].any()
    with pytest.raises(CheckpointError, match=r"states\.pt: is no whole file .*states/data/0"):
        load(path)


def test_a_file_without_checksums_is_read(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.serialization.set_crc32_options(True))
    torch.serialization.set_crc32_options(False)
    torch.save({"weight": torch.ones(2)}, tmp_path / "states.pt")
    assert load(tmp_path / "states.pt")["weight"].tolist() == [1, 1]
