"""A config file, the files it extends and `--set` overrides, composed into one tree of values.

Later wins: extended files in their order, then the file itself, then `--set`. Objects merge key by
key, everything else is replaced whole. Knows no keys except those that compose (`extends`, `_note`,
`$schema`) and those that hold paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.config.errors import NO_VALUE, ConfigError, Problem
from megatron_lite.config.fields import kind
from megatron_lite.config.json_text import Document, join, parse
from megatron_lite.config.tokenizer_files import FILE_KEYS
from megatron_lite.pipeline.table_files import is_table_file

CORPUS_KEYS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
NOTE = "_note"


@dataclass
class Tree:
    """Values as written, not yet checked against the schema."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """JSON path to `file:line` or `--set`, for objects and values alike."""
    problems: list[Problem] = field(default_factory=list)

    def origin(self, path: str) -> str:
        """Where the value at `path` was written, or the object around it; empty if nowhere."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return ""

    def merge(self, other: Tree) -> None:
        """Lay `other` over this tree."""
        self._merge_object(self.values, other.values, "", other)
        self.problems += other.problems

    def _merge_object(
        self, below: dict[str, Any], above: dict[str, Any], path: str, other: Tree
    ) -> None:
        for key, value in above.items():
            place = join(path, key)
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                self.origins[place] = other.origin(place)
                self._merge_object(below[key], value, place, other)
                continue
            below[key] = value
            self.origins = {p: o for p, o in self.origins.items() if not _inside(p, place)}
            self.origins |= {p: o for p, o in other.origins.items() if _inside(p, place)}


def compose(path: str | Path, overrides: Iterable[str] = ()) -> Tree:
    """Read `path` with all it extends, and lay the overrides `section.key=JSON` over it.

    Raises:
        ConfigError: a file is missing, unreadable, no JSON object, or extends itself. Lesser faults
            (a key given twice, a malformed override or note) are left in `problems`, so that they
            are reported together with the rest.
    """
    tree = _read(Path(path), ())
    for override in overrides:
        tree.merge(_override(override))
    return tree


def _read(path: Path, chain: tuple[Path, ...]) -> Tree:
    shown = _shown(path)
    if path.resolve() in chain:
        loop = " -> ".join(_shown(p) for p in (*chain, path))
        raise ConfigError([Problem(shown, NO_VALUE, f"extends itself: {loop}")])
    document = _parse_file(path, shown)
    own, problems = document.value, list(document.problems)
    own.pop("$schema", None)
    tree, faults = Tree(), []
    for parent in _parents(own.pop("extends", []), document, shown):
        try:
            tree.merge(_read(path.parent / parent, (*chain, path.resolve())))
        except ConfigError as error:
            faults += error.problems
    if faults:
        raise ConfigError(faults)
    origins = {place: f"{shown}:{line}" for place, line in document.lines.items()}
    _strip_notes(own, "", problems, origins)
    _anchor(own, path.absolute().parent)
    tree.merge(Tree(own, origins, problems))
    return tree


def _parse_file(path: Path, shown: str) -> Document:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem(shown, NO_VALUE, f"is not UTF-8 text (byte {error.start})")
        raise ConfigError([problem]) from None
    except OSError as error:
        problem = Problem(shown, NO_VALUE, f"cannot be read: {error.strerror}", _siblings(path))
        raise ConfigError([problem]) from None
    document = parse(text, shown)
    if not isinstance(document.value, dict):
        rule = f"must hold a JSON object, not {kind(document.value)}"
        raise ConfigError([Problem(shown, NO_VALUE, rule)])
    return document


def _parents(value: Any, document: Document, shown: str) -> list[str]:
    parents = [value] if isinstance(value, str) else value
    if not isinstance(parents, list) or not all(isinstance(p, str) and p for p in parents):
        rule = "must be a file name or a list of file names"
        origin = f"{shown}:{document.lines['extends']}"
        raise ConfigError([Problem("extends", value, rule, origin=origin)])
    return parents


def _override(text: str) -> Tree:
    """One `section.key=JSON`; a word that is not JSON counts as text, to spare the quotes."""
    name, equals, written = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys) or keys[0] == "extends":
        rule = "must have the form section.key=JSON and name a key of a section"
        return Tree(problems=[Problem("--set", text, rule, "for example training.train_iters=100")])
    try:
        document = parse(written, f"--set {name}")
    except ConfigError as error:
        if written.lstrip()[:1] in ("{", "[", '"'):
            return Tree(problems=error.problems)
        document = Document(written)
    values, problems = document.value, list(document.problems)
    for key in reversed(keys):
        values = {key: values}
    place = ".".join(keys)
    origins = dict.fromkeys([place, *(join(place, inner) for inner in document.lines)], "--set")
    _strip_notes(values, "", problems, origins)
    _anchor(values, Path.cwd())
    return Tree(values, origins, problems)


def _strip_notes(value: Any, path: str, problems: list[Problem], origins: dict[str, str]) -> None:
    """Take the notes out of every object; a note is text or a list of texts."""
    if not isinstance(value, dict):
        return
    if NOTE in value:
        note, place = value.pop(NOTE), join(path, NOTE)
        lines = note if isinstance(note, list) else [note]
        if not all(isinstance(line, str) for line in lines):
            rule = "must be text or a list of texts: notes carry no settings"
            problems.append(Problem(place, note, rule, origin=origins.get(place, "")))
    for key, inner in value.items():
        _strip_notes(inner, join(path, key), problems, origins)


def _anchor(values: dict[str, Any], folder: Path) -> None:
    """Make paths of corpora, tokenizers and tables absolute; they are relative to `folder`."""
    parallel = values.get("parallel")
    if isinstance(parallel, dict) and isinstance(name := parallel.get("pipeline_schedule"), str):
        parallel["pipeline_schedule"] = _absolute(name, folder) if is_table_file(name) else name
    data = values.get("data")
    if not isinstance(data, dict):
        return
    for key in (*CORPUS_KEYS, *FILE_KEYS):
        written = data.get(key)
        if isinstance(written, str) and written:
            data[key] = _absolute(written, folder)
        elif isinstance(written, list) and key in CORPUS_KEYS:
            first = 0 if len(written) == 1 else 1  # [prefix], or [weight, prefix, ...]
            for index in range(first, len(written), 2):
                if isinstance(written[index], str) and written[index]:
                    written[index] = _absolute(written[index], folder)


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / path)


def _inside(path: str, place: str) -> bool:
    return path == place or path.startswith((f"{place}.", f"{place}["))


def _shown(path: Path) -> str:
    """The path as a person at the current folder would write it."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith("..") else relative


def _siblings(path: Path) -> str:
    """For a missing file: what its folder holds instead."""
    if path.exists() or not path.parent.is_dir():
        return ""
    names = sorted(p.name for p in path.parent.glob("*.json"))
    return f"{_shown(path.parent)} holds {', '.join(names)}" if names else ""
