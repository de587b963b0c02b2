"""Finds parts of a JSON schema that match no finite value, because they always contain themselves.

llguidance refuses contradictions, but compiles circles of `$ref` without an exit: an answer could
not begin, or would never end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

from diptych_frontend.text.schema_parts import References, Schema, dict_at, list_at

ALL_TYPES: Final = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
CONTAINERS: Final = frozenset(("array", "object"))

Part = tuple[int, frozenset[str]]
"""A subschema by its identity, and the types that the surrounding schema allows."""
Ways = list[list[Part]]
"""A value exists if one of these ways works: all parts of the way have values."""


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    schema: Schema
    types: frozenset[str]
    path: str

    @property
    def part(self) -> Part:
        return id(self.schema), self.types


def endless_part(schema: object) -> str | None:
    """Return a JSON pointer to a part that matches no finite value; None if there is none.

    Only circles count. The time is proportional to the schema's size.
    """
    if not isinstance(schema, dict):
        return None
    places, needs = _explore(schema)
    users: defaultdict[Part, list[Part]] = defaultdict(list)
    for part, conditions in needs.items():
        for ways in conditions:
            for needed in (needed for way in ways for needed in way):
                users[needed].append(part)
    have_values: set[Part] = set()
    open_parts = list(needs)
    while open_parts:
        part = open_parts.pop()
        if part not in have_values and all(
            any(have_values.issuperset(way) for way in ways) for ways in needs[part]
        ):
            have_values.add(part)
            open_parts.extend(users[part])
    endless = [place.path for part, place in places.items() if part not in have_values]
    return max(endless, key=len, default=None)


def _explore(schema: Schema) -> tuple[dict[Part, SchemaPlace], dict[Part, list[Ways]]]:
    """All parts that a value of the schema may use, and the conditions of each."""
    references = References(schema)
    root = SchemaPlace(schema, ALL_TYPES, "#")
    places = {root.part: root}
    needs: dict[Part, list[Ways]] = {}
    queue = [root]
    while queue:
        place = queue.pop()
        conditions, found = _conditions(place, references)
        needs[place.part] = conditions
        for other in found:
            if other.part not in places:
                places[other.part] = other
                queue.append(other)
    return places, needs


def _conditions(place: SchemaPlace, references: References) -> tuple[list[Ways], list[SchemaPlace]]:
    """What a value of one part needs, and the parts that it may use."""
    schema = place.schema
    if "enum" in schema or "const" in schema:
        return [], []
    types = place.types & _types(schema)
    found: list[SchemaPlace] = []

    def use(value: object, path: str, allowed: frozenset[str]) -> list[Part]:
        if not isinstance(value, dict):
            return []  # True takes anything, and llguidance itself knows what False leaves.
        used = SchemaPlace(value, allowed, path if path[0] == "#" else f"{place.path}/{path}")
        found.append(used)
        return [used.part]

    target = references.target(schema)
    whole = list_at(schema, "allOf")
    for member in (target, *whole):
        types &= _types(member)
    conditions: list[Ways] = []
    conditions.append([use(target, f"#{str(schema.get('$ref')).partition('#')[2]}", types)])
    conditions += [[use(member, f"allOf/{i}", types)] for i, member in enumerate(whole)]
    for key in ("anyOf", "oneOf"):
        members = list_at(schema, key)
        if members:
            conditions.append([use(m, f"{key}/{i}", types) for i, m in enumerate(members)])
    object_way = _object_way(schema, use)
    array_way = _array_way(schema, use)
    if types and types <= CONTAINERS:
        ways = {"object": object_way, "array": array_way}
        conditions.append([ways[name] for name in sorted(types)])
    return conditions, found


def _object_way(schema: Schema, use: Any) -> list[Part]:
    """What an object needs: a value for each property that it must have."""
    required = {name for name in list_at(schema, "required") if isinstance(name, str)}
    way: list[Part] = []
    properties = dict_at(schema, "properties")
    for name, value in properties.items():
        part = use(value, f"properties/{escaped(name)}", ALL_TYPES)
        way += part if name in required else []
    patterns = dict_at(schema, "patternProperties")
    for pattern, value in patterns.items():
        use(value, f"patternProperties/{escaped(pattern)}", ALL_TYPES)
    part = use(schema.get("additionalProperties"), "additionalProperties", ALL_TYPES)
    return way + (part if required - properties.keys() and not patterns else [])


def _array_way(schema: Schema, use: Any) -> list[Part]:
    """What an array needs: a value for each item that it must have."""
    before_2020 = isinstance(schema.get("items"), list)
    prefix = list_at(schema, "items" if before_2020 else "prefixItems")
    rest = schema.get("additionalItems" if before_2020 else "items")
    least = schema.get("minItems")
    least = least if isinstance(least, int) else 0
    way: list[Part] = []
    for index, value in enumerate(prefix):
        part = use(value, f"prefixItems/{index}", ALL_TYPES)
        way += part if index < least else []
    part = use(rest, "items", ALL_TYPES)
    return way + (part if least > len(prefix) else [])


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, dict):
        return ALL_TYPES
    named = schema.get("type")
    names = [named] if isinstance(named, str) else list_at(schema, "type")
    return frozenset(name for name in names if isinstance(name, str)) or ALL_TYPES


def escaped(name: str) -> str:
    """Return a name as a JSON pointer has it."""
    return name.replace("~", "~0").replace("/", "~1")
