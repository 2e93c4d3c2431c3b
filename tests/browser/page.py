"""A real TensorBoard on loopback, and its page as Debian's Chromium shows it, without a screen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

WATCHDOG = 90.0
"""Seconds after which a program that does not come to an end is killed."""
LOADS = 4
"""Times that the page is loaded until all its cards are drawn: a busy machine may answer later than
the browser's virtual time waits."""
OUTPUT = Path(__file__).parents[1] / "output"
"""Where screenshots are kept; not under version control."""


def missing() -> list[str]:
    """Programs that the tests need and that are not there."""
    return [name for name in ("chromium",) if shutil.which(name) is None]


@contextlib.contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read `logdir`; it is ended with all its children."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(WATCHDOG, os.killpg, (server.pid, signal.SIGKILL))
    watchdog.start()
    try:
        yield _address(server)
    finally:
        watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
            _wait_for_data(found[0])
            return found[0]
    raise AssertionError("TensorBoard ended: " + "".join(said))


def _wait_for_data(address: str) -> None:
    deadline = time.monotonic() + WATCHDOG
    while not fetch(address, "timeseries/tags")["scalars"]["runTagInfo"]:
        assert time.monotonic() < deadline, "TensorBoard read nothing"
        time.sleep(0.2)


def fetch(address: str, what: str) -> Any:
    """What TensorBoard's page asks its server for."""
    with urlopen(f"{address}data/plugin/{what}", timeout=WATCHDOG) as answer:
        return json.load(answer)


@dataclass(frozen=True)
class Card:
    """A chart of the time series page as it was drawn."""

    tag: str
    curves: tuple[tuple[tuple[float, float], ...], ...]
    """For each curve its corners, in pixels."""


def cards(address: str, *, tags: str, height: int, screenshot: Path | None = None) -> list[Card]:
    """The cards of the tags that match a regular expression, in a window of that height.

    Without a graphics processor TensorBoard draws SVG, whose paths are part of the page, so that
    they can be counted. Cards are filled when they come into view; the window has to be tall
    enough.
    """
    url = f"{address}?tagFilter={quote(tags)}&smoothing=0#timeseries"
    for _ in range(LOADS):
        found = _cards(_open(url, height=height, screenshot=screenshot))
        if found and all(card.curves for card in found):
            break
    return found


def _cards(page: str) -> list[Card]:
    found = []
    for text in page.split("<scalar-card ")[1:]:
        title = re.search(r'<tb-truncated-path [^>]*title="([^"]*)"', text)
        paths = re.findall(r'<path d="(M[^"]*)"[^>]*style="[^"]*stroke:', text)
        curves = tuple(
            tuple((float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.e]+),([-\d.e]+)", path))
            for path in paths
        )
        found.append(Card(title[1] if title else "", curves))
    return found


def _open(url: str, *, height: int, screenshot: Path | None) -> str:
    """The page's elements once it has nothing left to load, in virtual time."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += ["--disable-3d-apis", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size=1600,{height}"]
        command += ["--virtual-time-budget=60000", "--run-all-compositor-stages-before-draw"]
        command += ["--dump-dom", *([f"--screenshot={screenshot}"] if screenshot else [])]
        shown = subprocess.Popen(
            [*command, url],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            page, _ = shown.communicate(timeout=WATCHDOG)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shown.pid, signal.SIGKILL)
    assert shown.returncode == 0, f"chromium ended with {shown.returncode}"
    return page
