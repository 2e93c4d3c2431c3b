"""What `--validate-only` prints: every value with its origin, then DeepSpeed's configuration."""

from __future__ import annotations

import json
from typing import Any

from megatron_lite.config.deepspeed import deepspeed_config
from megatron_lite.config.json_text import join
from megatron_lite.config.load import LoadedConfig, resolved_dict


def render_resolved(loaded: LoadedConfig) -> str:
    """Two JSON objects as text; in the first, each value is followed by `// origin`."""
    lines = _lines(resolved_dict(loaded.config), "", loaded.origins)
    width = max(len(text) for text, origin in lines if origin and len(text) < 72)
    body = [f"{text:<{width}}  // {origin}" if origin else text for text, origin in lines]
    dp = loaded.data_parallel_size
    derived = json.dumps(deepspeed_config(loaded.config, dp), indent=2)
    title = f"// DeepSpeed, derived for {loaded.world_size} ranks (data parallel {dp}):"
    return "\n".join(["{", *body, "}", "", title, derived])


def _lines(values: dict[str, Any], path: str, origins: dict[str, str]) -> list[tuple[str, str]]:
    """(text, origin) of each line; lines that only open or close an object have no origin."""
    indent = "  " * (path.count(".") + 2 if path else 1)
    lines: list[tuple[str, str]] = []
    for number, (key, value) in enumerate(values.items(), start=1):
        place, comma = join(path, key), "," if number < len(values) else ""
        if isinstance(value, dict):
            inner = _lines(value, place, origins)
            lines += [(f'{indent}"{key}": {{', ""), *inner, (f"{indent}}}{comma}", "")]
        else:
            text = f'{indent}"{key}": {json.dumps(value, ensure_ascii=False)}{comma}'
            lines.append((text, origins[place]))
    return lines
