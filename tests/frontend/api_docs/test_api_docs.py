"""The API's description is that of the routes and types that serve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from cases import each
from starlette.routing import Route, Router

from diptych_frontend import app as app_module
from diptych_frontend.api_docs.document import openapi_document
from diptych_frontend.api_docs.page import page_of, type_text
from diptych_frontend.app import build_app
from diptych_frontend.openai.api_keys import OPEN_PATHS, ApiKeys


@pytest.fixture(scope="module")
def document() -> Any:
    return openapi_document()


def validator(document: Any, name: str) -> Any:
    """Checks values against a schema of the document."""
    schemas = {"components": document["components"], "$ref": f"#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator(schemas)


def test_every_route_is_described_and_nothing_else(
    engine: Any, document: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Route] = []

    def router(routes: list[Route], **options: Any) -> Router:
        served.extend(routes)
        return Router(routes, **options)

    monkeypatch.setattr(app_module, "Router", router)
    build_app(engine)
    is_served = {
        (route.path.replace(":path", ""), method.lower())
        for route in served
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {(path, method) for path, of in document["paths"].items() for method in of}
    assert is_served == described


def test_paths_that_need_no_key_are_those_that_are_open(document: Any) -> None:
    open_paths = {
        path
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if operation["security"] == []
    }
    assert open_paths == OPEN_PATHS


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref":
                yield each
            else:
                yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_reference_leads_somewhere(document: Any) -> None:
    schemas = document["components"]["schemas"]
    named = {ref.removeprefix("#/components/schemas/") for ref in references(document)}
    assert named <= schemas.keys()
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "name", "body", "answer"),
    [
        ("/v1/completions", "CompletionRequest", {"prompt": "hi"}, "Completion"),
        ("/v1/chat/completions", "ChatCompletionRequest", {"messages": [USER]}, "ChatCompletion"),
        ("/v1/responses", "ResponsesRequest", {"input": [USER], "truncation": None}, "Response"),
        ("/v1/messages", "MessagesRequest", {"messages": [USER], "max_tokens": 3}, "Message"),
        ("/v1/messages/count_tokens", "CountTokensRequest", {"messages": [USER]}, "TokenCount"),
        ("/tokenize", "TokenizeRequest", {"prompt": "hi"}, "Tokens"),
    ],
)
async def test_what_is_sent_and_answered_is_as_described(
    http: httpx.AsyncClient, document: Any, path: str, name: str, body: Any, answer: str
) -> None:
    body = {"model": "echo", **body}
    post = document["paths"][path]["post"]
    sent = post["requestBody"]["content"]["application/json"]["schema"]
    told = post["responses"]["200"]["content"]["application/json"]["schema"]
    assert sent["$ref"].endswith(f"/{name}")
    assert told["$ref"].rpartition("/")[2].rpartition(".")[2] == answer
    validator(document, sent["$ref"].rpartition("/")[2]).validate(body)
    whole = await http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    validator(document, told["$ref"].rpartition("/")[2]).validate(whole.json())
    wrong = body | {"model": 5}
    assert not validator(document, sent["$ref"].rpartition("/")[2]).is_valid(wrong)
    failure = post["responses"]["default"]["content"]["application/json"]["schema"]
    refused = (await http.post(path, json=wrong)).json()
    validator(document, failure["$ref"].rpartition("/")[2]).validate(refused)


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
THOUGHT_AND_CALL = '<think>why</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("path", "body", "kinds"),
    [
        ("/v1/chat/completions", {"logprobs": True}, ["reasoning_content", "tool_calls"]),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": FUNCTION}]},
            ["reasoning_content", "tool_calls"],
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "function", **FUNCTION}]},
            ["response.reasoning_text.delta", "response.function_call_arguments.done"],
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": {}}], "max_tokens": 500},
            ["thinking_delta", "input_json_delta"],
        ),
    ],
)
@pytest.mark.parametrize("said", ["hello", THOUGHT_AND_CALL])
async def test_every_event_of_a_stream_is_as_described(
    engine: Any,
    document: Any,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: Any,
    kinds: list[str],
    said: str,
) -> None:
    engine.reasoning_parser = "think"
    renderer = engine.renderer  # the engine repeats its prompt, which is what was said last
    monkeypatch.setattr(renderer, "render_chat", lambda messages, **_: renderer.render_prompt(said))
    field = "input" if path == "/v1/responses" else "messages"
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        sent = {"model": "echo", field: [USER], **body, "stream": True}
        answer = await client.post(path, json=sent)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    told = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    schema = {"components": document["components"], **told["schema"]["contentSchema"]}
    for event in events:
        jsonschema.Draft202012Validator(schema).validate(msgspec.json.decode(event))
    if said == THOUGHT_AND_CALL and "logprobs" not in body:
        assert all(f'"{kind}"' in answer.text for kind in kinds), answer.text
    assert len(events) > 2


@pytest.mark.parametrize(
    ("item", "is_one"),
    [
        (USER, True),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            True,
        ),
        ({"type": "function_call_output", "call_id": "c", "output": "1"}, True),
        ({"type": "reasoning", "summary": []}, True),
        ({"type": "item_reference", "id": "x"}, False),
        ({"type": "function_call", "call_id": "c"}, False),
        ({"role": "user"}, False),
    ],
)
def test_items_of_a_response_are_described(document: Any, item: Any, is_one: bool) -> None:
    request = {"model": "m", "input": [item]}
    assert validator(document, "ResponsesRequest").is_valid(request) is is_one


def structs(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for below in kind.__subclasses__():
        yield below
        yield from structs(below)


def test_fields_without_an_effect_are_said_to_have_none(document: Any) -> None:
    """By name, since types are not told by their schemas."""
    schemas = document["components"]["schemas"]
    checked = set()
    for kind in structs(msgspec.Struct):
        for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
            rules = getattr(kind, "RULES", {}) if name in schemas else {}
            for field, rule in rules.items():
                described = schemas[name]["properties"][field]
                assert described["description"] == f"{rule.outcome}: {rule.why}", (name, field)
                checked.add(name.rpartition(".")[2])
    assert checked >= {"ChatCompletionRequest", "ResponsesRequest", "MessagesRequest", "Tool"}
    background = schemas["ResponsesRequest"]["properties"]["background"]
    assert background["enum"] == [False, None]


def test_patterns_are_those_of_json_schemas(document: Any) -> None:
    tool = validator(document, "diptych_frontend.anthropic.api_types.Tool")
    assert tool.is_valid({"name": "f", "input_schema": {}})
    assert not tool.is_valid({"name": "a b", "input_schema": {}})
    assert "\\Z" not in str(document)


COMPLETION = ("/v1/completions", {"prompt": "hi", "max_tokens": 2})
CHAT = ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2})
RESPONSE = ("/v1/responses", {"input": "hi", "max_output_tokens": 2})
MESSAGE = ("/v1/messages", {"messages": [USER], "max_tokens": 2})
EMBEDDING = ("/v1/embeddings", {"input": "hi"})
SCORE = ("/score", {"queries": "a", "documents": ["b"]})
RERANK = ("/rerank", {"query": "a", "documents": ["b"]})
TOKENS = ("/tokenize", {"prompt": "hi"})
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 100], [-0.1, 100.1]),
    "top_p": ([0.001, 1], [0, 1.1]),
    "top_k": ([-1, 0, 7], [-2]),
}
SAMPLING: dict[str, tuple[list[Any], list[Any]]] = {
    **RANGES,
    "n": ([1, 2], [0, -1, 129]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.1, 100], [0, 100.1]),
    "max_tokens": ([1], [0]),
    "min_tokens": ([0, 2], [-1]),
    "stop": (["a", [], ["a"] * 16], ["", [""], ["a"] * 17, "a" * 1025]),
    "bad_words": ([[], ["a"]], [[""], ["a"] * 17]),
    "stop_token_ids": ([[1] * 256], [[1] * 257]),
    "logit_bias": ([{}, {"1": -100}], [{"1": 100.1}]),
}
PROMPTS: tuple[list[Any], list[Any]] = (
    ["a", ["a", "b"], [1, 2], [[1], [2, 3]]], [[], [1, "a"], ["a", [1]]],
)  # fmt: skip
FORMS: tuple[list[Any], list[Any]] = (
    [{"regex": "a", "json": None}, {"choice": ["a"]}, {"json": {}}, {"json_object": True}],
    [{}, {"regex": "a", "grammar": 'start: "a"'}, {"json_object": False}, {"choice": []},
     {"choice": [""]}, {"regex": ""}, {"json": ""}, {"grammar": "", "regex": None}],
)  # fmt: skip
DEMANDED: list[tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = [
    *((CHAT, {name: values}) for name, values in SAMPLING.items()),
    *(
        (COMPLETION, {name: values})
        for name, values in {**SAMPLING, "max_tokens": ([0, 1], [-1])}.items()
    ),
    *((MESSAGE, {name: values}) for name, values in RANGES.items()),
    *((RESPONSE, {name: RANGES[name]}) for name in ("temperature", "top_p")),
    (COMPLETION, {"prompt": PROMPTS}),
    (COMPLETION, {"structured_outputs": FORMS}),
    (EMBEDDING, {"input": ([], PROMPTS[1])}),
    (RESPONSE, {"input": (["a", [USER]], [[]])}),
    (SCORE, {"text_1": ([None], ["b"]), "items": ([None], ["b"]), "documents": ([], [[], None])}),
    (RERANK, {"documents": ([], [[]])}),
    (TOKENS, {"messages": ([None], [[USER]]), "prompt": (["a"], [None])}),
]


@each(
    ("request_", "field", "values"),
    [
        pytest.param(request, field, values, id=f"{request[0]} {field}")
        for request, fields in DEMANDED
        for field, values in fields.items()
    ],
)
async def test_what_the_servers_checks_demand_is_described(
    http: httpx.AsyncClient, document: Any, request_: Any, field: str, values: Any
) -> None:
    """And it is still these checks that refuse: a decoder would say `$.field`."""
    path, body = request_
    sent = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = validator(document, sent["$ref"].rpartition("/")[2])
    sound, wrong = values
    for value in sound:
        asked = {"model": "echo", **body, field: value}
        assert described.is_valid(asked), value
        assert (await http.post(path, json=asked)).status_code == 200, value
    for value in wrong:
        asked = {"model": "echo", **body, field: value}
        assert not described.is_valid(asked), value
        refused = await http.post(path, json=asked)
        assert refused.status_code == 400, value
        assert "$." not in refused.json()["error"]["message"]


class Tags(HTMLParser):
    """What a page has in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


async def test_the_page_needs_nothing_but_itself(http: httpx.AsyncClient) -> None:
    answer = await http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    tags = Tags()
    tags.feed(answer.text)
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "link", "img", "iframe", "form"}
    attributes = {name for _, of in tags.seen for name in of}
    assert not any(name.startswith("on") or name in ("style", "src") for name in attributes)
    anchors = {of["id"] for _, of in tags.seen if "id" in of}
    links = [of["href"] or "" for tag, of in tags.seen if tag == "a"]
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    assert [link for link in links if not link.startswith("#")] == ["openapi.json"]
    assert "POST /v1/messages" in answer.text


async def test_the_document_is_served(http: httpx.AsyncClient, document: Any) -> None:
    assert (await http.get("/openapi.json")).json() == document


async def test_whoever_has_no_key_may_read_how_to_ask(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "alice").write_text("sesame")
    transport = httpx.ASGITransport(build_app(engine, api_keys=ApiKeys(tmp_path)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("/openapi.json", "/docs"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 5}, "integer (from 1 to 5)"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": "array", "items": {"type": "string"}}, "list of string"),
        ({"enum": ["<a>", None]}, "<code>&lt;a&gt;</code>, <code>null</code>"),
        ({"$ref": "#/components/schemas/a.b.C"}, '<a href="#a.b.C">C (b)</a>'),
        ({}, "any"),
    ],
)
def test_types_in_words(schema: Any, text: str) -> None:
    assert type_text(schema) == text


def test_a_page_escapes_what_it_shows() -> None:
    evil = "<evil>"
    operation = {"summary": evil, "responses": {"200": {}, "default": {"content": {}}}}
    field = {"type": "string", "pattern": evil, "description": evil}
    page = page_of(
        {
            "info": {"title": evil, "version": "1"},
            "paths": {f"/{evil}": {"get": operation}},
            "components": {"schemas": {evil: {"description": evil, "properties": {evil: field}}}},
        }
    )
    assert evil not in page
    assert page.count("&lt;evil&gt;") >= 8


def test_operations_have_names_that_programs_can_use(document: Any) -> None:
    names = [of["operationId"] for methods in document["paths"].values() for of in methods.values()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"\w+", name) for name in names)


async def test_the_description_and_the_server_agree_that_no_token_is_negative(
    http: httpx.AsyncClient, document: Any
) -> None:
    for token, status in ((0, 200), (-1, 400)):
        body = {"tokens": [token]}
        assert validator(document, "DetokenizeRequest").is_valid(body) == (status == 200)
        assert (await http.post("/detokenize", json=body)).status_code == status
