"""The last act of whoever writes a checkpoint: what it says of itself, and then its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.scan import file_facts


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
    texts = {}
    for name, value in ((store.CONFIG, config), (store.ORIGINS, origins)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
        texts[name] = file_facts(folder / name)
    replace(manifest, texts=texts).write(folder)
    store.commit(folder, root, manifest.step, keep_last=keep_last)
    return store.step_folder(root, manifest.step)
