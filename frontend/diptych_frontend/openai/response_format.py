"""`response_format`: the requested form of an answer, as in the OpenAI API."""

from __future__ import annotations

from typing import Any

import msgspec

from diptych_frontend.text.structured_outputs import check_strict
from diptych_protocol import StructuredOutputsParams


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """No particular form."""


class JsonObjectFormat(
    msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] = {}
    strict: bool | None = None
    """The schema must declare, for each object, all of its properties as required and no others as
    allowed."""


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def check_format(response_format: ResponseFormat | None, field: str) -> None:
    """Raise `InvalidRequestError`, naming the field, for a schema that breaks its own `strict`."""
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
