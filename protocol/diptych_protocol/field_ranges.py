"""Reads the meaning and the range of a configuration's fields from its types, and checks the
ranges.

msgspec checks what it decodes, but not what a program constructs.
"""

from __future__ import annotations

from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from diptych_protocol.errors import InvalidRequestError


def check_fields(config: msgspec.Struct) -> None:
    """Raise `InvalidRequestError`, naming the field, for the first value out of its range, here or
    in a nested configuration."""
    for name, kind, wanted in _fields(type(config)):
        value = getattr(config, name)
        if not _is_valid(value, kind):
            message = f"{name} must be {wanted}, not {value!r}"
            raise InvalidRequestError(message, param=name)
        if isinstance(value, msgspec.Struct):
            check_fields(value)


def _is_valid(value: Any, kind: Any) -> bool:
    try:
        # A dict would become a struct.
        return bool(msgspec.convert(value, kind) == value)
    except msgspec.ValidationError:
        return False


def descriptions(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the description in each field's `Meta`, without fields that have none."""
    fields = msgspec.json.schema(struct)["$defs"][struct.__name__]["properties"]
    found = {
        name: [
            part["description"]
            for part in (about, *about.get("anyOf", ()))
            if "description" in part
        ]
        for name, about in fields.items()
    }
    return {name: texts[0] for name, texts in found.items() if texts}


def ranges(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the range of each field in words."""
    return {name: wanted for name, _, wanted in _fields(kind)}


@lru_cache(64)
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any, str]]:
    """Each field with its type and with what it may be, in words."""
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hint, _wanted(hint)) for name, hint in hints.items()]


def _wanted(hint: Any, *metas: Meta) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _wanted(*parts)
    if origin in (Union, UnionType):
        return " or ".join(_wanted(part) for part in parts)
    if title := _said(metas, "title"):
        return str(title)
    if origin is Literal:
        *rest, last = map(str, parts)
        return f"{', '.join(rest)} or {last}" if rest else last
    if hint is type(None):
        return "left out"
    if hint is str:
        return "set" if _said(metas, "min_length") else "text"
    if hint is bool:
        return "true or false"
    if hint in (int, float):
        return _between(_said(metas, "ge"), _said(metas, "le"))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"a {hint.__name__}"
    return "names with texts" if origin is dict else "of its type"


def _said(metas: tuple[Meta, ...], what: str) -> Any:
    """What one of them says; msgspec refuses two that say it."""
    return next((said for meta in metas if (said := getattr(meta, what)) is not None), None)


def _between(low: float | None, high: float | None) -> str:
    if low is None:
        return "a number"
    if high is None:
        return f"at least {low}"
    return f"between {low} and {high}" if low < high else str(low)
