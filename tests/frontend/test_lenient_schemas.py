"""Keywords of a schema that cannot be enforced: refused, or left out and told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from cases import each
from engine_kit.echo_engine import EchoEngine

from diptych_frontend.text.structured_outputs import check_structured_outputs
from diptych_protocol import (
    EngineConfig,
    InvalidRequestError,
    RouterConfig,
    StructuredOutputsParams,
)

HEADER = "x-diptych-not-enforced"
SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
TAGS = {"type": "object", "properties": {"tags": SET}}
UNENFORCED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a set": (TAGS, {"uniqueItems"}),
    "several": ({"prefixItems": [SET, SET, {"type": "string", "not": {}}]}, {"uniqueItems", "not"}),
    "conditions": (
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}, "not": {}},
        {"if", "then", "not"},
    ),
    "names": (
        {"type": "object", "propertyNames": {"pattern": "a"}, "dependentRequired": {"a": ["b"]}},
        {"propertyNames", "dependentRequired"},
    ),
    "a count": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
        {"minProperties", "maxProperties"},
    ),
    "one of several": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, {"oneOf"}),
    "a format": ({"type": "string", "format": "idn-email"}, {"format idn-email"}),
    "another document": (
        {"type": "array", "items": {"$ref": "https://example.com/a.json"}, "uniqueItems": True},
        {"$ref", "uniqueItems"},
    ),
    "a look ahead": ({"type": "string", "pattern": "^(?!no)[a-z]+$"}, {"pattern"}),
    "nothing of a set": ({"type": "array", "uniqueItems": False}, set()),
    "nothing": ({"type": "string", "pattern": "^(?i)a{2}$"}, set()),
}


def form(schema: dict[str, Any], *, lenient: bool) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, lenient=lenient)


@each("name", UNENFORCED)
def test_a_lenient_form_says_what_it_leaves_out(name: str) -> None:
    schema, left_out = UNENFORCED[name]
    assert set(check_structured_outputs(form(schema, lenient=True))) == left_out
    if left_out:
        with pytest.raises(InvalidRequestError, match='json_schemas: "lenient" leaves out'):
            check_structured_outputs(form(schema, lenient=False))
    else:
        assert check_structured_outputs(form(schema, lenient=False)) == ()


IMPOSSIBLE = [{"type": "odd"}, {"$ref": "#"}, {"type": "string", "pattern": "("}]


@pytest.mark.parametrize("schema", IMPOSSIBLE)
def test_a_lenient_form_must_be_possible_all_the_same(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        check_structured_outputs(form(schema, lenient=True))


def test_a_service_chooses_by_a_setting() -> None:
    for kind in (EngineConfig, RouterConfig):
        kind("dummy://", json_schemas="lenient").check()
        with pytest.raises(InvalidRequestError, match="json_schemas"):
            kind("dummy://", json_schemas="both").check()  # type: ignore[arg-type]


# --- by request and by service --------------------------------------------------------------------

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": TAGS}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": TAGS}}]
FORMAT = {"type": "json_schema", "name": "a", "schema": TAGS}
CONFIG = {"format": {"type": "json_schema", "schema": TAGS}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": (CHATS, CHAT | {"response_format": NAMED}),
    "a form": (CHATS, CHAT | {"structured_outputs": {"json": TAGS}}),
    "a call": (CHATS, CHAT | {"tools": TOOLS, "tool_choice": "required"}),
    "a text": ("/v1/completions", {"model": "echo", "prompt": "hi", "response_format": NAMED}),
    "a response": (RESPONSES, {"model": "echo", "input": "hi", "text": {"format": FORMAT}}),
    "a message": (MESSAGES, CHAT | {"max_tokens": 5, "output_config": CONFIG}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
async def test_a_request_chooses_and_else_its_service(
    http: httpx.AsyncClient, engine: EchoEngine, name: str, stream: bool
) -> None:
    path, body = ASKED[name]
    body = body | {"stream": stream}
    assert (await http.post(path, json=body)).status_code == 400
    assert not engine.seen
    answer = await http.post(path, json=body | {"json_schemas": "lenient"})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "uniqueItems")
    sent = engine.seen[-1][1].structured_outputs
    assert sent is not None
    assert sent.lenient or '"lenient":true' in (sent.grammar or "")
    engine.json_schemas = "lenient"
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "uniqueItems")
    assert (await http.post(path, json=body | {"json_schemas": "exact"})).status_code == 400
    assert HEADER not in (await http.post(CHATS, json=CHAT)).headers
