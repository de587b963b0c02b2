"""Checks a schema for what OpenAI's `strict: true` requires."""

from __future__ import annotations

from diptych_frontend.text.schema_parts import Schema, all_parts, dict_at, list_at
from diptych_protocol import InvalidRequestError


def check_strict(schema: Schema, of: str, field: str) -> None:
    """Raise `InvalidRequestError` unless a schema is one of an object, and each of its objects
    requires all of its properties and allows no others.

    of: the owner of the schema, in the words of OpenAI's errors. field: the field that contains it.
    """
    flaw = _flaw(schema)
    if flaw is not None:
        raise InvalidRequestError(
            f"Invalid schema for {of}: {flaw} Leave out `strict` if that is not wanted.",
            param=field,
        )


def _flaw(schema: Schema) -> str | None:
    if schema.get("type") != "object":
        return f"schema must be a JSON Schema of 'type: \"object\"', got {schema.get('type')!r}."
    for path, part in all_parts(schema):
        if not _is_of_object(part):
            continue
        context = f"In context={path!r},"
        if part.get("additionalProperties") is not False:
            return f"{context} 'additionalProperties' is required to be supplied and to be false."
        required = list_at(part, "required")
        missing = next((n for n in dict_at(part, "properties") if n not in required), None)
        if missing is not None:
            return (
                f"{context} 'required' is required to be supplied and to be an array including "
                f"every key in properties. Missing {missing!r}."
            )
    return None


def _is_of_object(schema: Schema) -> bool:
    kind = schema.get("type")
    return (
        kind == "object" or "properties" in schema or (isinstance(kind, list) and "object" in kind)
    )
