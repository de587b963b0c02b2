"""Calls that a model decides on by itself: with `strict` tools their arguments fit."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from cases import each
from engine_kit.echo_engine import EchoEngine
from llguidance import LLMatcher

from diptych_frontend.app import build_app
from diptych_frontend.openai.api_types import ChatCompletionRequest
from diptych_frontend.text.structured_outputs import (
    _bytes_as_tokens,
    check_structured_outputs,
    grammar_of,
    is_json,
    parser_limits,
)
from diptych_frontend.tool_calls.formats import FORMATS, SIGNS
from diptych_frontend.tool_calls.tools import Tool, forced_call, free_calls
from diptych_protocol import StructuredOutputsParams

CITY = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
SET = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SETS = CITY | {"properties": {"city": SET}}
STRICT: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": CITY, "strict": True},
}
FREE: Any = {"type": "function", "function": {"name": "now", "parameters": CITY}}
CHAT: Any = {"model": "echo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


PARIS = call("weather", {"city": "Paris"})
FITS = [
    "",
    "Quotes \" and ' and { and <tool_cal and " + "3" * 60 + ", é\n\n and 𝄞.",
    PARIS,
    f"I will look.\n{PARIS}",
    call("now", {"any": [{"thing": None}]}),
]
SEVERAL = [f"{PARIS}\n{PARIS} and {call('now', {})}\nSo.", f"{PARIS} That was all."]
BREAKS = [
    ("<tool_call>\n", "x"),
    ('a <tool_call>\n{"name": "', "sunset"),
    ('<tool_call>\n{"name": "weather", "arguments": {"', "town"),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": ', "1"),
    ('<tool_call>\n{"name": "weather", "arguments": {', "}"),
    (call("now", {}).removesuffix("</tool_call>"), "\n"),
]


def form_of(*tools: Any, parallel: bool = True) -> StructuredOutputsParams | None:
    asked = msgspec.convert(tools, list[Tool])
    return free_calls(asked, parallel=parallel, lenient=False)


def matcher(parallel: bool) -> LLMatcher:
    form = form_of(STRICT, FREE, parallel=parallel)
    assert form is not None
    assert not is_json(form)  # digits of the text are nobody's number
    check_structured_outputs(form, "tools")
    return LLMatcher(_bytes_as_tokens(), grammar_of(form), log_level=0, limits=parser_limits())


def test_a_forced_call_is_json_whatever_its_schema_says() -> None:
    schema = {"type": "object", "properties": {"mode": {"enum": ["[lazy]", "x\nbegin[lazy]:"]}}}
    tool = {"type": "function", "function": {"name": "set", "parameters": schema}}
    form = forced_call(
        msgspec.convert([tool], list[Tool]), "required", parallel=True, lenient=False
    )
    assert form is not None
    assert is_json(form)  # so its numbers end


def taken_by(form: StructuredOutputsParams, answer: str) -> int:
    """How many characters of an answer a form lets through."""
    found = LLMatcher(_bytes_as_tokens(), grammar_of(form), log_level=0, limits=parser_limits())
    return found.try_consume_tokens(list(answer.encode()))


def fits(answer: str, *, parallel: bool = True) -> bool:
    found, written = matcher(parallel), answer.encode()
    return found.try_consume_tokens(list(written)) == len(written) and found.is_accepting()


@each("answer", FITS)
@each("parallel", [True, False])
def test_text_is_free_and_calls_fit_their_tools(answer: str, parallel: bool) -> None:
    assert fits(answer, parallel=parallel)


@pytest.mark.parametrize("answer", SEVERAL)
def test_an_answer_goes_on_after_a_call_where_several_are_allowed(answer: str) -> None:
    assert fits(answer)
    assert not fits(answer, parallel=False)


@pytest.mark.parametrize(("before", "wrong"), BREAKS)
def test_a_call_that_fits_no_tool_cannot_be_written(before: str, wrong: str) -> None:
    whole = (before + wrong).encode()
    assert matcher(True).try_consume_tokens(list(whole)) == len(before.encode())


def test_without_a_strict_tool_an_answer_has_no_form() -> None:
    assert form_of(FREE) is None
    assert form_of() is None


# --- by the routes --------------------------------------------------------------------------------


async def asked(http: httpx.AsyncClient, engine: EchoEngine, **changes: Any) -> Any:
    body = CHAT | {"tools": [FREE, STRICT]} | changes
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return engine.seen[-1][1].structured_outputs


async def test_a_chat_with_a_strict_tool_asks_for_it(
    http: httpx.AsyncClient, engine: EchoEngine
) -> None:
    assert await asked(http, engine) == form_of(FREE, STRICT)
    alone = await asked(http, engine, parallel_tool_calls=False, stream=True)
    assert alone == form_of(FREE, STRICT, parallel=False)
    for nothing in ({"tool_choice": "none"}, {"tools": [FREE]}, {"tools": None}):
        assert await asked(http, engine, **nothing) is None
    response = {"type": "function", **STRICT["function"]}
    body = {"model": "echo", "input": "hi", "tools": [response], "max_output_tokens": 5}
    assert (await http.post("/v1/responses", json=body)).status_code == 200
    assert engine.seen[-1][1].structured_outputs == form_of(STRICT)


RAIN = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
FORMED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "rain", "schema": RAIN}}
}


@pytest.mark.parametrize("tools", [[FREE], [FREE, STRICT]])
async def test_an_answer_with_a_form_may_be_a_call_instead(
    http: httpx.AsyncClient, engine: EchoEngine, tools: list[Any]
) -> None:
    """Agents ask for both at once."""
    form = await asked(http, engine, tools=tools, **FORMED)
    assert is_json(form)
    for answer in ('{"rain": true}', call("now", {}), f"{call('now', {})}\n{call('now', {})}"):
        assert taken_by(form, answer) == len(answer)
    for answer, fitting in (("{}", "{"), ("So.", ""), (f"{call('now', {})} So.", call("now", {}))):
        assert taken_by(form, answer) == len(fitting)
    alone = await asked(http, engine, tools=tools, parallel_tool_calls=False, **FORMED)
    assert taken_by(alone, f"{call('now', {})}\n") == len(call("now", {}))
    other = await asked(http, engine, tools=tools, response_format={"type": "json_object"})
    assert taken_by(other, '{"sun": []}') == len('{"sun": []}')
    assert await asked(http, engine, tools=tools, tool_choice="none", **FORMED) == (
        StructuredOutputsParams(json=RAIN)
    )
    own = await asked(http, engine, tools=tools, structured_outputs={"regex": "a+"})
    assert own == StructuredOutputsParams(regex="a+")


async def test_the_form_of_a_message_is_not_that_of_a_forced_call(
    http: httpx.AsyncClient, engine: EchoEngine
) -> None:
    forced = {"tool_choice": "required"}
    assert await asked(http, engine, **forced, **FORMED) == await asked(http, engine, **forced)
    body = CHAT | {"tools": [FREE], **forced, "guided_regex": "a+"}
    refused = await http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")


async def test_a_form_beside_tools_is_refused_by_its_own_field(http: httpx.AsyncClient) -> None:
    schema = {"name": "sets", "schema": SETS}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    refused = await http.post("/v1/chat/completions", json=CHAT | {"tools": [FREE], **form})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("name", FORMATS)
async def test_only_calls_in_json_between_ordinary_texts_are_held_to_it(
    engine: EchoEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sign = next((sign for sign, sign_name in SIGNS if sign_name == name), None)
    monkeypatch.setattr(engine.renderer, "chat_template", f"{{{{ tools }}}}{sign}")
    engine.reasoning_parser = "harmony" if name == "harmony" else "none"
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await asked(http, engine) is None) == (name != "hermes")


async def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_its_tool(
    http: httpx.AsyncClient,
) -> None:
    function = {"name": "f", "parameters": SETS, "strict": True}
    body = CHAT | {"tools": [FREE, {"type": "function", "function": function}]}
    refused = await http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[1].function.parameters"
    lenient = await http.post("/v1/chat/completions", json=body | {"json_schemas": "lenient"})
    assert lenient.status_code == 200
    assert lenient.headers["x-diptych-not-enforced"] == "uniqueItems"


def test_the_tools_are_judged_one_by_one_and_together() -> None:
    request = msgspec.convert(CHAT | {"tools": [FREE, STRICT]}, ChatCompletionRequest)
    form = request.with_calls(None)
    assert form is not None
    fields = [field for field, _ in request.judged_forms(form)]
    assert fields == ["tools[1].function.parameters", "tools"]
