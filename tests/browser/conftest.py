"""A browser; where there is none the tests are skipped, but never in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.page import missing, tensorboard


@pytest.fixture(scope="session")
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """A TensorBoard that shows the resumed run."""
    lack = [f"{name} is not installed" for name in missing()]
    if lack and os.environ.get("CI") == "true":
        pytest.fail(f"no browser: {'; '.join(lack)}")
    if lack:
        pytest.skip(f"no browser: {'; '.join(lack)}; apt-get install chromium")
    resumed: Path = request.getfixturevalue("resumed")
    with tensorboard(resumed / "tensorboard") as found:
        yield found
