"""JSON Schema of a config file, so that editors complete and explain keys.

`python -m megatron_lite.config.json_schema --out configs/schema.json` writes it. Describes one
file, which may be a part of a run: nothing is required, and rules that join fields are not told.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import RunConfig

# pydantic leaves a bound that follows a validator of ours under its own name.
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
_NOTE = {
    "description": "A note for people; it carries no settings.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}
_COMPOSING = {
    "$schema": {"description": "Where an editor finds this schema.", "type": "string"},
    "extends": {
        "description": "Config files, relative to this one, to build on; later ones win.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    },
}


def json_schema() -> dict[str, Any]:
    """The schema as plain JSON values (draft 2020-12)."""
    schema: dict[str, Any] = _tidy(RunConfig.model_json_schema())
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
        part["properties"]["_note"] = _NOTE
    schema["properties"] = _COMPOSING | schema["properties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _tidy(node: Any) -> Any:
    """Bounds in JSON Schema's words, texts on one line, no generated titles, no copied defaults."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {_BOUNDS.get(key, key): _tidy(value) for key, value in node.items()}
    if isinstance(tidy.get("title"), str):
        del tidy["title"]
    if isinstance(tidy.get("description"), str):
        tidy["description"] = " ".join(tidy["description"].split())
    if "$ref" in tidy:
        tidy.pop("default", None)  # an object's defaults stand at its own fields
    return tidy


def schema_text() -> str:
    """The schema as the text of a file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the schema to `--out`, or to standard output."""
    parser = argparse.ArgumentParser(description="Write the JSON Schema of config files.")
    parser.add_argument("--out", type=Path, help="file to write; standard output if left out")
    out = parser.parse_args(arguments).out
    if out is None:
        print(schema_text(), end="")
    else:
        out.write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
