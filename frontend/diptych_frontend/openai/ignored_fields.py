"""Takes fields out of messages that nobody here knows.

Client libraries add fields to the messages of an answer, such as `index` and `parsed_arguments`,
and send them back with the next request. A field of the request itself that nobody knows is an
error, because it would change the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from msgspec.inspect import Field, ListType, StructType, Type, UnionType, type_info

log = logging.getLogger(__name__)

CONVERSATIONS: Final = ("messages", "input")
"""The fields of requests that hold messages."""
MAX_LOGGED: Final = 8


def drop_unknown(body: Any, kind: type) -> int:
    """Take unknown fields out of the messages of a decoded body. Return how many there were.

    kind: the struct that the body is to become.
    """
    if not isinstance(body, dict):
        return 0
    fields = _fields_of(kind)
    dropped = [
        name
        for part in CONVERSATIONS
        if part in fields and part in body
        for name in _dropped(body[part], fields[part].type)
    ]
    if dropped:
        log.debug("fields of messages that are not known: %s", dropped[:MAX_LOGGED])
    return len(dropped)


@cache
def _fields_of(kind: type) -> dict[str, Field]:
    info = type_info(kind)
    return _by_name(info) if isinstance(info, StructType) else {}


def _by_name(info: StructType) -> dict[str, Field]:
    return {field.encode_name: field for field in info.fields}


def _dropped(value: Any, info: Type) -> Iterator[str]:
    """Take unknown fields out of a value of this type. Yield their names."""
    if isinstance(value, list):
        for items in (arm for arm in _arms(info) if isinstance(arm, ListType)):
            for item in value:
                yield from _dropped(item, items.item_type)
    elif isinstance(value, dict):
        struct = _struct_of(value, info)
        if struct is None:
            return
        fields = _by_name(struct)
        for name in [name for name in value if name not in fields and name != struct.tag_field]:
            del value[name]
            yield name[:64]
        for name, inner in value.items():
            if name in fields:
                yield from _dropped(inner, fields[name].type)


def _struct_of(value: dict[str, Any], info: Type) -> StructType | None:
    """Return the struct that an object is to become; None if no struct has its tag."""
    for arm in _arms(info):
        if isinstance(arm, StructType) and (
            arm.tag_field is None or value.get(arm.tag_field) == arm.tag
        ):
            return arm
    return None


def _arms(info: Type) -> tuple[Type, ...]:
    return info.types if isinstance(info, UnionType) else (info,)
