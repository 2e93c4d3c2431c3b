"""Files that the data tools write: whole or not at all, and only where a file belongs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_lite.data.errors import DataError
from megatron_lite.data.files import atomic_writer


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A root user's --output /dev/null would leave a machine without one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, what in ((pipe, "no file"), (tmp_path, "a folder")):
        told = f"^{path}: is {what}; name the file to write$"
        with pytest.raises(DataError, match=told), atomic_writer(path):
            pass
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("before")
    with pytest.raises(OSError, match="No space left") as caught, atomic_writer(target):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(target)
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]
