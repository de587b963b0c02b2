"""`strict: true` demands of a schema what OpenAI demands."""

from __future__ import annotations

from typing import Any

import httpx
import openai.lib._pydantic
import pydantic
import pytest
from cases import each

from diptych_frontend.text.structured_outputs import check_strict
from diptych_protocol import InvalidRequestError

NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = {"type": "string"}
SOUND = {
    "type": "object",
    "properties": {"name": NAME, "more": {"anyOf": [{"$ref": "#/$defs/more"}, {"type": "null"}]}},
    "required": ["name", "more"],
    "additionalProperties": False,
    "$defs": {"more": NOTHING},
}
FLAWS: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"type": "string"}, "got 'string'"),
    "a choice": ({"anyOf": [SOUND]}, "got None"),
    "open": (
        {"type": "object", "properties": {"a": NAME}, "required": ["a"]},
        r"In context=\(\), 'additionalProperties'",
    ),
    "open on purpose": (SOUND | {"additionalProperties": True}, "to be false"),
    "one may be missing": (SOUND | {"required": ["more"]}, "Missing 'name'"),
    "none is required": (SOUND | {"required": None}, "Missing 'name'"),
    "inside": (
        SOUND | {"properties": {"name": NAME, "more": {"type": ["object", "null"]}}},
        r"context=\('properties', 'more'\)",
    ),
    "in a definition": (SOUND | {"$defs": {"more": {"properties": {}}}}, r"\('\$defs', 'more'\)"),
    "in a list": (
        SOUND | {"$defs": {"more": {"type": "array", "items": {"type": "object"}}}},
        r"'more', 'items'\)",
    ),
}


@each("name", FLAWS)
def test_a_schema_that_is_not_strict_is_refused_with_its_place(name: str) -> None:
    schema, says = FLAWS[name]
    with pytest.raises(InvalidRequestError, match=says) as refusal:
        check_strict(schema, "response_format 'a'", "response_format")
    assert refusal.value.param == "response_format"
    assert str(refusal.value).startswith("Invalid schema for response_format 'a': ")


class Inner(pydantic.BaseModel):
    values: list[int]
    word: str | None = None


class Outer(pydantic.BaseModel):
    inner: Inner
    others: list[Inner]
    by: Inner | str


def test_what_openais_client_makes_of_pydantic_is_strict() -> None:
    check_strict(openai.lib._pydantic.to_strict_json_schema(Outer), "response_format", "f")
    check_strict(SOUND, "response_format", "f")
    with pytest.raises(InvalidRequestError):
        check_strict(Outer.model_json_schema(), "response_format", "f")


OPEN = {"type": "object", "properties": {"a": NAME}}
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": "echo", "input": "hi"}


def asked(schema: dict[str, Any], strict: bool | None) -> list[tuple[str, dict[str, Any], str]]:
    named = {"name": "a", "schema": schema, "strict": strict}
    function = {"name": "f", "parameters": schema, "strict": strict}
    form = {"type": "json_schema", "json_schema": named}
    text = {"format": {"type": "json_schema", **named}}
    tool = {"type": "function", "function": function}
    completion = {"model": "echo", "prompt": "hi", "response_format": form}
    return [
        ("/v1/chat/completions", CHAT | {"response_format": form}, "response_format"),
        ("/v1/completions", completion, "response_format"),
        ("/v1/chat/completions", CHAT | {"tools": [tool]}, "tools[0].function.parameters"),
        ("/v1/responses", RESPONSE | {"text": text}, "text"),
        (
            "/v1/responses",
            RESPONSE | {"tools": [{"type": "function", **function}]},
            "tools[0].parameters",
        ),
    ]


async def test_every_api_takes_strict_at_its_word(http: httpx.AsyncClient) -> None:
    for path, body, field in asked(OPEN, True):
        response = await http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert "additionalProperties" in response.json()["error"]["message"]
    for path, body, _ in [*asked(OPEN, None), *asked(OPEN, False), *asked(SOUND, True)]:
        assert (await http.post(path, json=body)).status_code == 200
