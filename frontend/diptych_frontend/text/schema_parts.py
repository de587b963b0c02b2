"""Lists the parts of a JSON schema, and resolves its references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

Schema = dict[str, Any]
_IN_DICTS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_ALONE: Final = (
    "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems",
    "contains", "propertyNames", "not", "if", "then", "else",
)  # fmt: skip


def parts_of(schema: Schema) -> Iterator[tuple[tuple[str | int, ...], Schema]]:
    """Return the direct subschemas of a schema, each with its keys, without `true` and `false`."""
    for key in _IN_DICTS:
        for name, part in dict_at(schema, key).items():
            if isinstance(part, dict):
                yield (key, name), part
    for key in (*_IN_LISTS, "items"):
        for index, part in enumerate(list_at(schema, key)):
            if isinstance(part, dict):
                yield (key, index), part
    for key in (*_ALONE, "items"):
        part = schema.get(key)
        if isinstance(part, dict):
            yield (key,), part


def all_parts(schema: Schema) -> Iterator[tuple[tuple[str | int, ...], Schema]]:
    """Yield a schema and all subschemas in it, the outer ones first, each with the keys to it."""
    queue: list[tuple[tuple[str | int, ...], Schema]] = [((), schema)]
    for path, part in queue:
        yield path, part
        queue.extend(((*path, *keys), inner) for keys, inner in parts_of(part))


class References:
    """Resolves the references in a document."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._named: dict[str, Schema] = {}
        for _, part in all_parts(root):
            for key, form in (("$id", "{}"), ("$anchor", "#{}")):
                if isinstance(part.get(key), str):
                    self._named[form.format(part[key])] = part

    def target(self, schema: Schema) -> object:
        """Return the target of a part's `$ref`; None without one, or if it leads elsewhere."""
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return None
        if ref in self._named:
            return self._named[ref]
        document, _, pointer = ref.partition("#")
        node: object = self._named.get(document) if document else self._root
        for name in unquote(pointer).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name)
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        return node


def list_at(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def dict_at(schema: Schema, key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}
