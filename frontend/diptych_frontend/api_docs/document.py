"""Generates the OpenAPI document from the types that decode requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final, get_args

import msgspec

from diptych_frontend.anthropic import api_types as anthropic
from diptych_frontend.api_docs.narrowing import Schema, narrow
from diptych_frontend.api_docs.operations import OPERATIONS, Kind, Operation
from diptych_frontend.responses_api import api_types as responses
from diptych_protocol import StructuredOutputsParams

OPENAPI: Final = "3.1.0"
REFS: Final = "#/components/schemas/{name}"
JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
PARTS: Final = (
    anthropic.Tool,
    anthropic.OutputConfig,
    responses.FunctionTool,
    responses.TextConfig,
    responses.Reasoning,
    StructuredOutputsParams,
)
"""Parts of requests for which the server's checks require more than their types do."""
ITEMS: Final[tuple[Kind, ...]] = get_args(responses.Item)
"""The possible items in the input of a response."""


def openapi_document() -> Schema:
    """Return the document as plain values."""
    kinds = _kinds(OPERATIONS)
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=REFS)
    for kind, ref in zip(kinds, refs, strict=True):
        _add_rules(kind, schemas[_name(ref)])
    ref_of = dict(zip(kinds, refs, strict=True))
    _type_items(schemas, ref_of)
    narrow({kind: schemas[_name(ref)] for kind, ref in ref_of.items()})
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, ref_of)
    return {
        "openapi": OPENAPI,
        "info": {"title": "Diptych", "version": version("diptych")},
        "paths": paths,
        "components": {
            "schemas": _with_common_patterns(schemas),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _kinds(operations: Sequence[Operation]) -> list[Kind]:
    """Every type of the operations once."""
    kinds = [
        kind
        for operation in operations
        for kind in (operation.request, operation.answer, operation.failure, *operation.events)
        if kind is not None
    ]
    return list(dict.fromkeys([*kinds, *PARTS, *ITEMS]))


def _type_items(schemas: Schema, ref_of: dict[Kind, Schema]) -> None:
    """Say what the items of an input are: clients leave the type of a message out."""
    message = schemas[_name(ref_of[responses.Message])]
    message["required"].remove("type")
    items = {"anyOf": [ref_of[kind] for kind in ITEMS]}
    request = schemas[_name(ref_of[responses.ResponsesRequest])]
    request["properties"]["input"]["anyOf"][1]["items"] = items


def _name(ref: Schema) -> str:
    return str(ref["$ref"]).rpartition("/")[2]


def _add_rules(kind: Kind, schema: Schema) -> None:
    """Say of each field that has no effect why, and of one that is refused what it may be."""
    for field, rule in getattr(kind, "RULES", {}).items():
        described = schema["properties"].setdefault(field, {})
        described["description"] = f"{rule.outcome}: {rule.why}"
        if rule.outcome == "refused":
            described["enum"] = [*rule.neutral, None]


def _described(operation: Operation, ref_of: dict[Kind, Schema]) -> Schema:
    described: Schema = {
        "summary": operation.summary,
        "operationId": operation.method + re.sub(r"\W+", "_", operation.path).rstrip("_"),
        "responses": {
            "200": _answer(operation, ref_of),
            "default": {
                "description": "A failure.",
                "content": {JSON: {"schema": ref_of[operation.failure]}},
            },
        },
        "security": [{"bearer": []}, {"x-api-key": []}, {}] if operation.needs_key else [],
    }
    text = {"type": "string"}
    parameters = [
        *(
            {"name": name, "in": "path", "required": True, "schema": text}
            for name in operation.parameters
        ),
        *({"name": name, "in": "query", "schema": text} for name in operation.query),
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        kind = FORM if operation.takes_form else JSON
        content = {kind: {"schema": ref_of[operation.request]}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _answer(operation: Operation, ref_of: dict[Kind, Schema]) -> Schema:
    content: Schema = {}
    if operation.answer is not None:
        content[JSON] = {"schema": ref_of[operation.answer]}
    if operation.events:
        data = {"anyOf": [ref_of[kind] for kind in operation.events]}
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "The data of each event, but for a last one that is [DONE].",
                "contentMediaType": JSON,
                "contentSchema": data,
            }
        }
    return {"description": "The answer.", **({"content": content} if content else {})}


def _with_common_patterns(schemas: Schema) -> Schema:
    r"""Python's `\Z` is `$` in the regular expressions of JSON schemas."""
    encoded = msgspec.json.encode(schemas).replace(rb'\\Z"', b'$"')
    decoded: Schema = msgspec.json.decode(encoded)
    return decoded
