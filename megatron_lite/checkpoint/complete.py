"""The last act of whoever writes a checkpoint: what it says of itself, and then its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.manifest import Manifest


def complete(
    folder: Path,
    root: Path,
    manifest: Manifest,
    *,
    config: Mapping[str, Any],
    origins: Mapping[str, str],
    keep_last: int | None = None,
) -> Path:
    """Add manifest, config and origins to a folder whose tensors are written, and commit it."""
    manifest.write(folder)
    for name, value in (("config", config), ("origins", origins)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
    store.commit(folder, root, manifest.step, keep_last=keep_last)
    return store.step_folder(root, manifest.step)
