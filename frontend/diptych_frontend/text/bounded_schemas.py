"""Adds limits to a JSON schema where it lacks them and models tend to write without end.

The results fit the original schema; docs/answers.md says what is limited.
"""

from __future__ import annotations

from typing import Final

from diptych_frontend.text.schema_parts import (
    References,
    Schema,
    all_parts,
    dict_at,
    list_at,
    parts_of,
)

FORMAT_LENGTHS: Final = {
    "date-time": 35, "time": 24, "duration": 40, "email": 254, "hostname": 253, "uri": 2048,
}  # fmt: skip
"""The greatest length of a string in a format whose digits or names may go on for ever. With 35,
the seconds of a date and its offset have nine decimals."""
_SAYS_WHICH: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_KEPT_FOR_REFERENCES: Final = ("$defs", "definitions")
_COMBINES: Final = ("$ref", "allOf", "anyOf", "oneOf")
_ADDS: Final = ("minProperties", "if", "dependentSchemas", "dependencies", "dependentRequired")
"""Keywords that ask for properties beside those that are named. They cannot be enforced, but
closing the object would make what they ask for impossible."""


def bounded(schema: Schema) -> Schema:
    """Return a schema that forbids further properties where it names some and says nothing of
    others, and limits strings in formats without a length. Raises `RecursionError`."""
    met = _met_by_others(schema)
    return _bounded(schema, met)


def _bounded(schema: Schema, met: set[int]) -> Schema:
    changed: Schema = {}
    for key, value in schema.items():
        if key == "uniqueItems" and value is False:
            continue  # llguidance does not have the keyword, whatever it says
        changed[key] = value
        if key in ("properties", "patternProperties", *_KEPT_FOR_REFERENCES):
            changed[key] = {
                name: _bounded(part, met) if isinstance(part, dict) else part
                for name, part in dict_at(schema, key).items()
            }
        elif key in (*_COMBINES, "prefixItems", "items") and isinstance(value, list):
            changed[key] = [_bounded(p, met) if isinstance(p, dict) else p for p in value]
        elif key in ("items", "additionalProperties", "additionalItems"):
            changed[key] = _bounded(value, met) if isinstance(value, dict) else value
    if _is_closed(schema) and id(schema) not in met:
        changed["additionalProperties"] = False
    length = FORMAT_LENGTHS.get(str(schema.get("format")))
    if length is not None and "maxLength" not in schema:
        changed["maxLength"] = length
    return changed


def _is_closed(schema: Schema) -> bool:
    """It names the properties that it wants."""
    properties = dict_at(schema, "properties")
    says = any(key in schema for key in (*_SAYS_WHICH, *_ADDS, *_COMBINES))
    required = list_at(schema, "required")
    return bool(properties) and not says and all(str(name) in properties for name in required)


def _met_by_others(schema: Schema) -> set[int]:
    """The parts that hold of a value together with other parts, which may know more properties."""
    references = References(schema)
    met: set[int] = set()
    queue: list[Schema] = []
    parts = [part for _, part in all_parts(schema)]

    def meet(part: object) -> None:
        if isinstance(part, dict) and id(part) not in met:
            met.add(id(part))
            queue.append(part)

    def meet_applied(part: Schema) -> None:
        meet(references.target(part))
        for key in ("allOf", "anyOf", "oneOf"):
            for member in list_at(part, key):
                meet(member)

    for part in parts:
        applied = [key for key in (*_COMBINES, "properties", *_SAYS_WHICH) if key in part]
        if len(applied) > 1 or len(list_at(part, "allOf")) > 1:
            meet_applied(part)
    while queue:
        part = queue.pop()
        meet_applied(part)
        for keys, inner in parts_of(part):
            if keys[0] not in _KEPT_FOR_REFERENCES:
                meet(inner)  # its value is one value of several parts, too
    return met
