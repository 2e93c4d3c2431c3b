"""Types of the configuration's fields: stricter than pydantic's own, wider in one place.

A number may be written in any way JSON allows (5e8 and 10.0 are whole numbers), but text is never a
number and never a switch, and NaN and Infinity are refused. Used by the files in `sections/`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, Strict
from pydantic_core import PydanticCustomError, core_schema

T = TypeVar("T")


class Section(BaseModel):
    """Base of every JSON object of the configuration: immutable, no unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


def kind(value: object) -> str:
    """A JSON value's kind in words: `kind("1e-4")` is `text`, `kind([1])` is `a list`."""
    if value is None:
        return "null"
    names = {bool: "true or false", str: "text", list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number", "must be a number, not {kind}", {"kind": kind(value)})
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond a float's range
        number = math.inf
    if not math.isfinite(number):
        raise PydanticCustomError("number", "must be a finite number")
    return number


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = "must be a whole number, not {kind}"
        raise PydanticCustomError("whole", message, {"kind": kind(value)})
    if isinstance(value, float) and not value.is_integer():
        raise PydanticCustomError("whole", "must be a whole number")
    return int(value)


def _loss_scale(value: Any) -> Any:
    if value == "dynamic":
        return value
    if isinstance(value, str) or (number := _number(value)) <= 0:
        raise PydanticCustomError("loss_scale", 'must be "dynamic" or a number above 0')
    return number


def _variables(value: Any) -> dict[str, str]:
    rule = "must be an object of names and texts"
    if not isinstance(value, dict):
        raise PydanticCustomError("variables", f"{rule}, not {{kind}}", {"kind": kind(value)})
    for name, text in value.items():
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            message = f"{rule}; {{name}} is no name of a variable"
            raise PydanticCustomError("variables", message, {"name": name})
        if not isinstance(text, str) or "\0" in text:
            message = f"{rule}; {{name}} is {{kind}}"
            raise PydanticCustomError("variables", message, {"name": name, "kind": kind(text)})
    return value


class _Nullable:
    """Accepts null although the type has no None: `derive` replaces it before anyone reads it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.nullable_schema(handler(source))


Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), MinLen(1)]
Whole = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int), Ge(0)]
PositiveWhole = Annotated[int, BeforeValidator(_whole, json_schema_input_type=int), Gt(0)]
Number = Annotated[float, BeforeValidator(_number, json_schema_input_type=float), Ge(0)]
PositiveNumber = Annotated[float, BeforeValidator(_number, json_schema_input_type=float), Gt(0)]
Fraction = Annotated[Number, Le(1)]
"""From 0 to 1, both included."""
Decay = Annotated[Number, Lt(1)]
"""From 0 to below 1: the decay rate of a running mean."""
Variables = Annotated[
    dict[str, str], BeforeValidator(_variables, json_schema_input_type=dict[str, str])
]
"""Names and values of environment variables."""
LossScale = Annotated[
    Literal["dynamic"] | float,
    BeforeValidator(_loss_scale, json_schema_input_type=Literal["dynamic"] | float),
]
Derived = Annotated[T, _Nullable()]
"""A field whose null stands for a rule; after loading it always holds the rule's result."""
DERIVE: Any = None
"""The default of a `Derived` field."""
