"""Finds what no answer can follow in a JSON schema that llguidance takes.

*Circles.* Parts that match no finite value, because they always contain themselves. llguidance
refuses contradictions, but compiles circles of `$ref` without an exit: an answer could not begin,
or would never end.

*Widths.* Objects that are too wide for it. At each place of an answer its parser holds all that may
come next in one row of at most 2,000 items. Members that may be left out come next together: as
many as there are up to the next one that is required. The row is found out only when an answer gets
there, so it is counted here before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

from diptych_frontend.text.schema_parts import References, Schema, all_parts, dict_at, list_at

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


MAX_ROW: Final = 2000
"""llguidance's `max_items_in_row`."""
ITEMS_OF_OPTIONAL: Final = 4
"""Items for each member of an object that requires none."""
ITEMS_BEFORE_REQUIRED: Final = 3
ITEMS_AFTER_REQUIRED: Final = 2
MEMBERS_OF_OPEN: Final = 2
"""An object that takes further members has as many items more as one with these. The constants
agree with the pinned llguidance up to one member (tests/frontend/test_hopeless_forms.py)."""


class Rows(NamedTuple):
    """Items in the rows of an object."""

    first: int
    """Behind its bracket."""
    later: int
    """In the widest row behind a required member."""


def too_wide_part(schema: Schema) -> str | None:
    """Return a JSON pointer to an object that no answer could write; None if there is none.

    schema: as it is compiled.
    """
    references = References(schema)
    known: dict[int, Rows] = {}
    for path, part in all_parts(schema):
        if max(_rows(part, references, known)) > MAX_ROW:
            return "/".join(["#", *(escaped(str(key)) for key in path)])
    return None


def _rows(part: Schema, references: References, known: dict[int, Rows]) -> Rows:
    """The rows of a part's own members, with those of its alternatives. Alternatives that begin
    with different constants share no row behind them."""
    if id(part) not in known:
        known[id(part)] = Rows(0, 0)  # a part that contains itself adds nothing
        joined = [*_joined(part, references, set())]
        first, later = _own_rows(joined)
        behind: dict[object, int] = {}
        for each in joined:
            for other in (*list_at(each, "anyOf"), *list_at(each, "oneOf")):
                if isinstance(other, dict):
                    rows = _rows(other, references, known)
                    first += rows.first
                    constant = _first_constant([*_joined(other, references, set())])
                    behind[constant] = behind.get(constant, 0) + rows.later
        later += behind.pop(None, 0) + max(behind.values(), default=0)
        known[id(part)] = Rows(first, later)
    return known[id(part)]


def _joined(part: object, references: References, met: set[int]) -> Iterator[Schema]:
    """A part, and those that hold of its values as well."""
    if isinstance(part, dict) and id(part) not in met:
        met.add(id(part))
        yield part
        for other in (references.target(part), *list_at(part, "allOf")):
            yield from _joined(other, references, met)


def _first_constant(parts: Sequence[Schema]) -> tuple[str, str] | None:
    """The first member and the one value that it must have, if it must have one."""
    for part in parts:
        for name, value in islice(dict_at(part, "properties").items(), 1):
            if not (isinstance(value, dict) and any(name in list_at(p, "required") for p in parts)):
                return None
            allowed = [value["const"]] if "const" in value else list_at(value, "enum")
            return (name, repr(allowed[0])) if len(allowed) == 1 else None
    return None


def _own_rows(parts: Sequence[Schema]) -> Rows:
    names: dict[str, None] = {}
    required: set[object] = set()
    is_open = True
    for part in parts:
        names |= dict.fromkeys(dict_at(part, "properties"))
        required |= {name for name in list_at(part, "required") if isinstance(name, str)}
        is_open = is_open and part.get("additionalProperties") is not False
    if not names:
        return Rows(0, 0)
    if required.isdisjoint(names):
        return Rows(ITEMS_OF_OPTIONAL * (len(names) + MEMBERS_OF_OPEN * is_open), 0)
    runs = [(must, len([*run])) for must, run in groupby(names, key=required.__contains__)]
    later = max(0 if must else ITEMS_AFTER_REQUIRED * length + 1 for must, length in runs)
    must, length = runs[0]
    return Rows(0 if must else ITEMS_BEFORE_REQUIRED * length + min(len(runs), 4), later)
