"""Turns fields of a configuration into options of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from diptych_protocol.errors import UNREADABLE


def option(field: msgspec.structs.FieldInfo, kind: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for one field.

    kind: the field's type, without its `Meta`.
    """
    about: dict[str, Any] = {"required": field.required}
    if field.default is not msgspec.NODEFAULT:
        about["default"] = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        about["default"] = field.default_factory()
    if kind is bool:
        return about | {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        values = get_args(kind)
        return about | {"choices": values, "type": type(values[0])}
    return about | {"type": _reader(kind), "metavar": field.name.upper()}


def _reader(kind: Any) -> Callable[[str], Any]:
    """From the text of an option to a value; objects and lists are written as JSON."""
    arms = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    plain = {str, int, float, type(None)}.issuperset(arms)

    def read(text: str) -> Any:
        try:
            if plain:
                return msgspec.convert(text, kind, strict=False)
            return msgspec.json.decode(text, type=kind)
        except UNREADABLE as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return read
