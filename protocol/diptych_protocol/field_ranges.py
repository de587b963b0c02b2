"""Checks the fields of a configuration against their types and `Meta`, and says what is wanted.

msgspec checks what it decodes, but not what a program constructs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from diptych_protocol.errors import InvalidRequestError


def check_fields(config: msgspec.Struct) -> None:
    """Raise `InvalidRequestError`, naming the field, for the first value out of its range."""
    for name, kind, wanted in _fields(type(config)):
        value = getattr(config, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            message = f"{name} must be {wanted}, not {value!r}"
            raise InvalidRequestError(message, param=name) from None


@lru_cache(64)
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any, str]]:
    """Each field with its type and with what it may be, in words."""
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hints[name], _wanted(inspect.type_info(hints[name]))) for name in hints]


def _wanted(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return (extra or {}).get("title") or _wanted(inner)
        case inspect.UnionType(types=types):
            return " or ".join(_wanted(each) for each in types)
        case inspect.NoneType():
            return "left out"
        case inspect.LiteralType(values=values):
            *rest, last = map(str, values)
            return f"{', '.join(rest)} or {last}" if rest else last
        case inspect.IntType(ge=low, le=high) | inspect.FloatType(ge=low, le=high):
            return _between(low, high)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(min_length=least):
            return "set" if least else "text"
        case inspect.DictType():
            return "names with texts"
    return "of its type"


def _between(low: float | None, high: float | None) -> str:
    if low is None:
        return "a number"
    if high is None:
        return f"at least {low}"
    return f"between {low} and {high}" if low < high else str(low)
