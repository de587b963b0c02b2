"""`response_format`: the form of an answer as the OpenAI API asks for it."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych_frontend.text.strict_schemas import check_strict
from diptych_protocol import StructuredOutputsParams


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """No form at all."""


class JsonObjectFormat(
    msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] = {}
    strict: bool | None = None
    """The schema must say of each object that it has all of its properties, and no others."""


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def check_format(response_format: ResponseFormat | None, field: str) -> None:
    """Raise `InvalidRequestError`, naming the field, for a schema that is not what it says."""
    if isinstance(response_format, JsonSchemaFormat) and response_format.json_schema.strict:
        named = response_format.json_schema
        check_strict(named.schema, f"response_format {named.name[:64]!r}", field)


def form_of(
    response_format: ResponseFormat | None, *, lenient: bool
) -> StructuredOutputsParams | None:
    match response_format:
        case JsonObjectFormat():
            return StructuredOutputsParams(json_object=True)
        case JsonSchemaFormat(json_schema):
            return StructuredOutputsParams(json=json_schema.schema, lenient=lenient)
        case _:
            return None
