"""Turns fields of a configuration into options of a command line, and reads its file."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from diptych_protocol.errors import UNREADABLE

log = logging.getLogger(__name__)

C = TypeVar("C", bound=msgspec.Struct)


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


def config_in(path: Path, kind: type[C]) -> C:
    """Read the configuration that an operator has written. It may be of another version: fields
    that this one does not have are reported and ignored, because no pod would start otherwise."""
    data = path.read_bytes()
    config = msgspec.json.decode(data, type=kind)
    unknown = _unknown(msgspec.json.decode(data), config)
    if unknown:
        log.warning("%s has settings that this version does not have: %s", path, ", ".join(unknown))
    return config


def _unknown(raw: Mapping[str, Any], known: msgspec.Struct) -> list[str]:
    """The fields of an object that a struct did not take, with those of its parts."""
    found = sorted(raw.keys() - set(known.__struct_fields__))
    for name in raw.keys() - set(found):
        part = getattr(known, name)
        if isinstance(part, msgspec.Struct):
            found += [f"{name}.{field}" for field in _unknown(raw[name], part)]
    return found
