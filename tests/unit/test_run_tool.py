"""How a tool ends: exit codes and what it says."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_lite.command import run_tool


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("a: is wrong"), 2, "error: a: is wrong"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            1,
            "error: /data/x: No space left on device; free some, or write elsewhere",
        ),
        (OSError("no whole file"), 1, "error: output: no whole file"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was left behind"),
    ],
)
def test_codes_and_words(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tool(raising(error), refused=ValueError) == code
    assert capsys.readouterr().err == f"{told}\n"


def test_a_file_in_a_folders_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place"
    place.touch()
    assert run_tool(lambda: place.mkdir(exist_ok=True), refused=ValueError) == 1
    assert f"error: {place}: is there already, and is no folder" in capsys.readouterr().err


def test_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tool >&-`, or a service without one."""
    monkeypatch.setattr(sys, "stdout", None)
    assert run_tool(lambda: print("unheard"), refused=ValueError) == 0
