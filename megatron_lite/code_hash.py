"""A hash of a package's code, by which two runs or two ranks can be told apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

DIGITS = 12
"""Of a hash that are kept: enough to tell two apart, short enough to be read out."""


def code_hash(folder: Path) -> str:
    """Over the names and contents of all Python files of a package; OSError where one can't be
    read."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]
