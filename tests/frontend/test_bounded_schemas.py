"""What a bounded schema allows, the schema that it is made of allows, too; and it is closed where
nothing speaks against it."""

from __future__ import annotations

from typing import Any

from cases import each

from diptych_frontend.text.bounded_schemas import bounded

A: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": A}}
REF = {"$ref": "#/$defs/x"}


def defs(part: dict[str, Any]) -> dict[str, Any]:
    return {"$defs": {"x": part}}


CLOSED = A | {"additionalProperties": False}
OPEN: dict[str, dict[str, Any]] = {
    "says so": A | {"additionalProperties": True},
    "a schema for others": A | {"additionalProperties": {"type": "null"}},
    "patterns": A | {"patternProperties": {"^x": {}}},
    "others are required": A | {"required": ["a", "z"]},
    "a number of others": A | {"minProperties": 3},
    "a condition": A | {"if": {"required": ["a"]}, "then": {"required": ["z"]}},
    "a schema that depends": A | {"dependentSchemas": {"a": {"required": ["z"]}}},
    "a dependency": A | {"dependencies": {"a": ["z"]}},
    "what depends is required": A | {"dependentRequired": {"a": ["z"]}},
    "a map": {"type": "object"},
    "together": {"allOf": [A, B]},
    "together by reference": {"allOf": [REF, A], **defs(B)},
    "beside a reference": {"properties": {"c": {}}, **REF, **defs({"allOf": [A]})},
    "beside a choice": {"properties": {"c": {}}, "anyOf": [A, B]},
    "as a value of both": {"allOf": [{"properties": {"v": A}}, {"properties": {"v": B}}]},
    "a value, not a schema": {"const": A, "enum": [A], "default": A, "examples": [A]},
}


@each("name", OPEN)
def test_an_object_stays_open_if_others_may_know_more_of_it(name: str) -> None:
    assert bounded(OPEN[name]) == OPEN[name]


@each(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"items": A}, {"items": CLOSED}),
        ({"items": [A]}, {"items": [CLOSED]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [REF], "title": "t", **defs(A)}, {"allOf": [REF], "title": "t", **defs(CLOSED)}),
        ({**REF, **defs(A)}, {**REF, **defs(CLOSED)}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED}),
        (B, {"type": "object", "properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"format": "date-time"}, {"format": "date-time", "maxLength": 35}),
        ({"format": "email", "maxLength": 9}, {"format": "email", "maxLength": 9}),
    ],
    ids=str,
)
def test_what_is_left_open_by_oversight_is_closed(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert bounded(schema) == expected
