"""A configuration under examination: every field that parsed, also where others did not.

pydantic stops at a section with a fault; a draft goes on, so that rules that join fields still see
the sound ones. Reading a field that is missing or faulty raises `Absent`, which a rule need not
catch: it is then skipped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_lite.config.errors import NO_VALUE, Problem
from megatron_lite.config.fields import Section, kind
from megatron_lite.config.json_text import join
from megatron_lite.config.suggest import section_class, unknown_key


class Absent(Exception):
    """The field has no value that could be checked."""


class Draft:
    """Stands in for a section while it is checked; fields are read as attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise Absent(name) from None

    def set(self, name: str, value: Any) -> None:
        """Give a field its derived value."""
        self._values[name] = value

    def drop(self, name: str) -> None:
        """Mark a field as faulty."""
        del self._values[name]

    def as_dict(self) -> dict[str, Any]:
        """The plain values, sections as dictionaries."""
        return {k: v.as_dict() if isinstance(v, Draft) else v for k, v in self._values.items()}


def draft_section(
    section: type[Section], raw: Any, path: str, report: Callable[[Problem], None]
) -> Draft:
    """Parse the JSON object `raw`, found at `path`, field by field; faults go to `report`."""
    if not isinstance(raw, dict):
        report(Problem(path, raw, f"must be an object, not {kind(raw)}"))
        return Draft({})
    for key in raw:
        if key not in section.model_fields:
            report(Problem(join(path, key), raw[key], *unknown_key(path, key, section)))
    values: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        place, inner = join(path, name), section_class(field.annotation)
        if inner and not (raw.get(name) is None and field.default is None):
            values[name] = draft_section(inner, raw.get(name, {}), place, report)
        elif name in raw:
            value = _parse(field, raw[name], place, report)
            if value is not NO_VALUE:
                values[name] = value
        elif field.is_required():
            report(Problem(place, NO_VALUE, "is required", _first_sentence(field.description)))
        else:
            values[name] = field.default
    return Draft(values)


def _parse(field: FieldInfo, raw: Any, path: str, report: Callable[[Problem], None]) -> Any:
    """The field's value, or NO_VALUE after a report."""
    type_: Any = Annotated[field.annotation, Field(), *field.metadata]
    adapter: TypeAdapter[Any] = TypeAdapter(type_)
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        entries = [i for i in first["loc"] if isinstance(i, int) and i < len(raw)]
        index, value = (f"[{entries[0]}]", first["input"]) if entries else ("", raw)
        rule, suggestion = _explain(first["type"], first["msg"], first.get("ctx", {}), value)
        if raw is None and field.default is not None and not field.is_required():
            suggestion = f"leave the key out for its default, {json.dumps(field.default)}"
        report(Problem(path + index, value, rule, suggestion))
        return NO_VALUE


def _explain(type_: str, message: str, context: dict[str, Any], value: Any) -> tuple[str, str]:
    """(rule, suggestion) in this project's words for a pydantic error."""
    match type_:
        case "greater_than":
            nearest = "use 1 or more" if isinstance(value, int) else ""
            return f"must be above {_plain(context['gt'])}", nearest
        case "greater_than_equal":
            return f"must be at least {_plain(context['ge'])}", f"use {_plain(context['ge'])}"
        case "less_than":
            return f"must be below {_plain(context['lt'])}", ""
        case "less_than_equal":
            return f"must be at most {_plain(context['le'])}", f"use {_plain(context['le'])}"
        case "literal_error":
            return _explain_choice(re.findall(r"'([^']*)'", context["expected"]), value)
        case "schedule":
            return message, _explain_choice(context["names"].split(", "), value)[1]
        case "bool_type":
            return f"must be true or false, not {kind(value)}", _unquoted(value)
        case "string_type":
            return f"must be text, not {kind(value)}", ""
        case "string_too_short" | "too_short" if value in ("", [], ()):
            return "must not be empty", ""
        case "tuple_type":
            return f"must be a list, not {kind(value)}", ""
        case "missing" | "too_long" | "too_short":
            return "has the wrong number of entries", ""
        case "whole" if isinstance(value, float) and math.isfinite(value):
            return message, f"use {math.floor(value)} or {math.ceil(value)}"
        case _:
            return message, _unquoted(value)


def _explain_choice(choices: list[str], value: Any) -> tuple[str, str]:
    rule = f"must be one of {', '.join(choices)}"
    lowered = {choice.lower(): choice for choice in choices}
    near = get_close_matches(value.lower(), lowered, n=1) if isinstance(value, str) else []
    return rule, f'did you mean "{lowered[near[0]]}"?' if near else ""


def _unquoted(value: Any) -> str:
    """For a number or switch written as text: how to write it."""
    if not isinstance(value, str):
        return ""
    word = value.strip().lower() if value.strip().lower() in ("true", "false") else value.strip()
    try:
        json.loads(word)
    except ValueError:
        return ""
    return f"write {word} without quotes"


def _plain(number: float) -> str:
    return f"{number:g}"


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", text or "", maxsplit=1)[0].rstrip(".")
