"""/v1/messages: how a conversation becomes a chat, and how answers and failures are told."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from cases import each

from diptych_frontend.anthropic.answers import why_stopped
from diptych_frontend.app import build_app
from diptych_frontend.openai.api_types import MAX_MESSAGES
from diptych_frontend.openai.request_workers import INLINE_BYTES
from diptych_protocol import (
    EngineGenerateError,
    EngineOverloadedError,
    StructuredOutputsParams,
    TenantOverloadedError,
)

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
REASONING, ANSWER = "hm, < so ", "Hello </think> there"
THOUGHT = f"<think>\n{REASONING}</think>\n\n{ANSWER}"


def body(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": list(turns) or [USER], "max_tokens": 5, **fields}


async def ask(http: httpx.AsyncClient, sent: dict[str, Any], path: str = PATH) -> Any:
    answer = await http.post(path, json=sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[tuple[str, Any]]:
    """The events of a stream: their names and data."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


@pytest.fixture
def rendered(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the chat template is given. The engine answers with the last message."""
    seen: list[Any] = []

    def render(messages: list[dict[str, Any]], **options: Any) -> Any:
        seen.append((messages, options))
        content = messages[-1]["content"]
        return engine.renderer.render_prompt(content if isinstance(content, str) else "image")

    monkeypatch.setattr(engine.renderer, "render_chat", render)
    return seen


@pytest.fixture
async def thinking(engine: Any, rendered: list[Any]) -> AsyncIterator[httpx.AsyncClient]:
    """A server whose model reasons."""
    engine.reasoning_parser = "think"
    engine.renderer.chat_template = "{{ enable_thinking }}"
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


BEGUN = {"role": "assistant", "content": "It"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
FAILED = {"content": [{"type": "text", "text": "no"}], "is_error": True}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}
NO_CONTENT: list[Any] = [
    [], None, 5, {}, ["x"], [[]], [{}], [{"type": "text", "text": None}],
]  # fmt: skip


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


@pytest.mark.parametrize(
    ("sent", "messages"),
    [
        (body(), [USER]),
        (
            body(system="Be brief."),
            [{"role": "system", "content": "Be brief."}, USER],
        ),
        (
            body(system=[text("a", cache_control={"type": "ephemeral"}), text("b")]),
            [{"role": "system", "content": "a\nb"}, USER],
        ),
        (
            body(USER, {"role": "user", "content": [text("there")]}),
            [{"role": "user", "content": "hi\nthere"}],
        ),
        (
            body(USER, {"role": "system", "content": "Go on."}, USER),
            [USER, {"role": "system", "content": "Go on."}, USER],
        ),
        (
            body({"role": "user", "content": [text("see"), {"type": "image", "source": IMAGE}]}),
            [
                {
                    "role": "user",
                    "content": [
                        text("see"),
                        {
                            "type": "image_url",
                            "image_url": {"url": "data:image/png;base64,aGk=", "detail": None},
                        },
                    ],
                }
            ],
        ),
        (
            body(
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "so", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("let me"),
                        USE,
                    ],
                },
                {"role": "user", "content": [RESULT | {"content": "42"}, text("and now?")]},
            ),
            [
                USER,
                {
                    "role": "assistant",
                    "content": "let me",
                    "reasoning_content": "so",
                    "thinking": "so",
                    "tool_calls": [
                        {
                            "id": "t1",
                            "type": "function",
                            "function": {"name": "f", "arguments": {"x": 1}},
                        }
                    ],
                },
                {"role": "tool", "content": "42", "tool_call_id": "t1"},
                {"role": "user", "content": "and now?"},
            ],
        ),
        (
            body({"role": "user", "content": [RESULT | FAILED]}),
            [{"role": "tool", "content": "Error:\nno", "tool_call_id": "t1"}],
        ),
        (
            body({"role": "user", "content": [RESULT]}),
            [{"role": "tool", "content": "", "tool_call_id": "t1"}],
        ),
    ],
    ids=[
        "a text", "system", "system in blocks", "turns of one role", "system between", "an image",
        "a call and its result", "a failed call", "a result without content",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_a_conversation_becomes_a_chat(
    http: httpx.AsyncClient,
    rendered: list[Any],
    path: str,
    sent: dict[str, Any],
    messages: list[Any],
) -> None:
    if path == COUNT:
        sent = {name: value for name, value in sent.items() if name != "max_tokens"}
    answer = await http.post(path, json=sent)
    assert rendered, answer.text
    assert rendered[0][0] == messages


async def test_tools_are_given_to_the_template(
    http: httpx.AsyncClient, rendered: list[Any]
) -> None:
    await ask(http, body(tools=[TOOL], tool_choice={"type": "auto"}))
    await ask(http, body(tools=[TOOL], tool_choice={"type": "none"}))
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    given = [options["tools"] for _, options in rendered]
    assert given == [[{"type": "function", "function": function}], None]


@pytest.mark.parametrize(
    ("choice", "several"),
    [
        ({"type": "any"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, False),
        ({"type": "tool", "name": "f"}, False),
    ],
)
async def test_a_forced_call_is_a_form(
    http: httpx.AsyncClient, engine: Any, choice: dict[str, Any], several: bool
) -> None:
    await ask(http, body(tools=[TOOL], tool_choice=choice))
    [(_, params, _, _)] = engine.seen
    grammar = params.structured_outputs.grammar
    assert '\\"name\\": \\"f\\"' in grammar
    assert grammar.startswith("start: call\n") is not several


async def test_options_reach_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["x"], "priority": 3,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "cache_salt": "s", "metadata": {"user_id": "me"}, "service_tier": "auto",
    }  # fmt: skip
    await ask(http, body(**options))
    [(_, params, priority, prompt)] = engine.seen
    told = (params.temperature, params.top_p, params.top_k, params.stop, params.max_tokens)
    assert told == (0.5, 0.9, 7, ["x"], 5)
    assert params.structured_outputs == StructuredOutputsParams(json=SCHEMA)
    assert (priority, prompt["cache_salt"]) == (3, "s")


async def test_what_claude_code_and_users_of_vllm_send_is_taken(
    http: httpx.AsyncClient, rendered: list[Any]
) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    variables = {"enable_thinking": False}
    asked = body(context_management=edits, chat_template_kwargs=variables)
    answer = await http.post(PATH, json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-diptych-ignored"] == "context_management"
    assert rendered[-1][1]["template_kwargs"] == variables


async def test_an_answer_that_has_begun_goes_on(http: httpx.AsyncClient, engine: Any) -> None:
    await ask(http, body(USER, BEGUN))
    [(_, _, _, prompt)] = engine.seen
    asked = engine.renderer.decode(prompt["prompt_token_ids"])
    assert asked.endswith("assistant: It")
    sent = {name: value for name, value in body(USER, BEGUN).items() if name != "max_tokens"}
    assert (await ask(http, sent, COUNT))["input_tokens"] == len(prompt["prompt_token_ids"])


@each(
    ("changes", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        *(
            ({"messages": [{"role": role, "content": content}]}, "messages[0].content")
            for role in ("user", "assistant", "system")
            for content in NO_CONTENT
        ),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "messages[1].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "tool_use"),
        ({"messages": [USER, {"role": "assistant", "content": [RESULT]}, USER]}, "tool_result"),
        ({"messages": [USER, BEGUN], "thinking": {"type": "adaptive"}}, "without thinking"),
        ({"messages": [USER, BEGUN], "tools": [TOOL], "tool_choice": {"type": "any"}}, "tools"),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"tool_use_id": None}]}]},
            "tool_use_id",
        ),
        ({"system": 5}, "system"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tools": [TOOL | {"type": "web_search_20250305"}]}, "type"),
        ({"tools": [TOOL | {"name": "a b"}]}, "name"),
        ({"tools": [TOOL | {"input_schema": {"type": "x"}}], "tool_choice": {"type": "any"}}, "f"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
        ({"output_config": {"effort": "much"}}, "effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
            "output_config",
        ),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"loudly": True}, "loudly"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    strict_http: httpx.AsyncClient, changes: dict[str, Any], says: str
) -> None:
    answer = await strict_http.post(PATH, json=body(**changes))
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert says in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"]


VERSIONS = {"2023-01-01": 400, "2023-06-01": 200, "2026-10-21": 200, "tomorrow": 400}


async def test_two_versions_of_the_api_are_spoken(http: httpx.AsyncClient) -> None:
    for path, sent in ((PATH, body()), (COUNT, {"model": "echo", "messages": [USER]})):
        for version, status in VERSIONS.items():
            headers = {"anthropic-version": version}
            answer = await http.post(path, json=sent, headers=headers)
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (EngineOverloadedError("full"), 503, "overloaded_error"),
        (TenantOverloadedError("yours are too many"), 429, "rate_limit_error"),
        (EngineGenerateError("broken"), 500, "api_error"),
        (RuntimeError("a secret"), 500, "api_error"),
    ],
)
async def test_failures_are_told_in_the_form_of_the_api(
    http: httpx.AsyncClient, engine: Any, refusal: Exception, status: int, kind: str
) -> None:
    engine.refusal = refusal
    answer = await http.post(PATH, json=body())
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (status in (429, 503))


async def test_a_path_or_method_that_is_not_there(http: httpx.AsyncClient) -> None:
    answer = await http.post(f"{PATH}/batches", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert (await http.get(PATH)).json()["type"] == "error"
    large = await http.post(PATH, content=b" " * (80 << 10))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


async def test_a_failure_in_a_stream_is_its_last_event(
    http: httpx.AsyncClient, engine: Any
) -> None:
    engine.failure = EngineGenerateError("the engine was lost")
    answer = await http.post(PATH, json=body(stream=True))
    *_, (name, data) = events(answer.text)
    assert name == "error"
    assert data["error"] == {"type": "api_error", "message": "the engine was lost"}


async def test_a_stream_begins_with_the_message_and_counts_at_its_end(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post(PATH, json=body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    (_, start), (ping, _), *_, (_, delta), (end, _) = events(answer.text)
    assert (ping, end) == ("ping", "message_stop")
    prompt = len("user: hi\nassistant: ")
    assert start["message"]["usage"]["input_tokens"] == prompt - prompt // 2
    assert start["message"]["content"] == []
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 5


def thought(**changes: Any) -> dict[str, Any]:
    turn = {"role": "user", "content": THOUGHT + "\0"}
    return body(turn, **({"max_tokens": 500, "stop_sequences": ["\0"]} | changes))


async def test_reasoning_is_a_block_of_its_own(thinking: httpx.AsyncClient) -> None:
    for wish in (None, {"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}):
        told = await ask(thinking, thought(thinking=wish))
        first, second = told["content"]
        assert (first["type"], first["thinking"]) == ("thinking", REASONING)
        assert (second["type"], second["text"]) == ("text", ANSWER)
        details = told["usage"]["output_tokens_details"]
        assert 0 < details["thinking_tokens"] < told["usage"]["output_tokens"]


async def test_streamed_reasoning_is_a_block_of_its_own(thinking: httpx.AsyncClient) -> None:
    answer = await thinking.post(PATH, json=thought(stream=True))
    told = events(answer.text)
    kinds = [data["content_block"]["type"] for name, data in told if name == "content_block_start"]
    assert kinds == ["thinking", "text"]
    pieces: dict[int, str] = {0: "", 1: ""}
    for name, data in told:
        if name == "content_block_delta":
            delta = data["delta"]
            pieces[data["index"]] += delta.get("thinking", "") + delta.get("text", "")
    assert pieces == {0: REASONING, 1: ANSWER}
    assert [data["index"] for name, data in told if name == "content_block_stop"] == [0, 1]


async def test_reasoning_may_be_left_out_or_turned_off(
    thinking: httpx.AsyncClient, rendered: list[Any]
) -> None:
    wish = {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}
    told = await ask(thinking, thought(thinking=wish))
    assert [block["type"] for block in told["content"]] == ["text"]
    assert told["content"][0]["text"] == ANSWER
    told = await ask(thinking, thought(thinking={"type": "disabled"}))
    assert [block["text"] for block in told["content"]] == [THOUGHT]
    assert rendered[-1][1]["template_kwargs"] == {"enable_thinking": False}


async def test_no_reasoning_is_wished_for_where_nobody_knows_any(
    http: httpx.AsyncClient, rendered: list[Any]
) -> None:
    await ask(http, body(thinking={"type": "disabled"}))
    await ask(http, body(thinking={"type": "adaptive"}))
    told = await ask(http, body(thinking={"type": "enabled", "budget_tokens": 2000}))
    assert [block["type"] for block in told["content"]] == ["text"]
    assert [options["template_kwargs"] for _, options in rendered] == [None, None, None]


async def test_blanks_alone_are_no_block(http: httpx.AsyncClient, rendered: list[Any]) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    turn = {"role": "user", "content": f" \n{call}\0"}
    sent = body(turn, tools=[TOOL], max_tokens=500, stop_sequences=["\0"])
    told = await ask(http, sent)
    assert [block["type"] for block in told["content"]] == ["tool_use"]
    answer = await http.post(PATH, json=sent | {"stream": True})
    starts = [data for name, data in events(answer.text) if name == "content_block_start"]
    assert [data["content_block"]["type"] for data in starts] == ["tool_use"]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "full", "told"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", 2, False, ("end_turn", None)),
        ("stop", "x", False, ("stop_sequence", "x")),
        ("tool_calls", "x", False, ("tool_use", None)),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("model_context_window_exceeded", None)),
    ],
)
def test_why_an_answer_ended(
    finish_reason: str, stop_reason: Any, full: bool, told: tuple[str, str | None]
) -> None:
    assert why_stopped(finish_reason, stop_reason, full=full) == told


@pytest.mark.parametrize("finish_reason", ["abort", None])
def test_an_answer_that_was_broken_off_is_none(finish_reason: str | None) -> None:
    with pytest.raises(EngineGenerateError):
        why_stopped(finish_reason, None, full=False)


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_what_takes_long_is_done_beside_the_event_loop(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads: set[int] = set()
    render = engine.renderer.render_chat

    def noted(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return render(*args, **options)

    monkeypatch.setattr(engine.renderer, "render_chat", noted)
    engine.max_model_len = 10 * INLINE_BYTES
    sent = body({"role": "user", "content": "a" * INLINE_BYTES})
    if path == COUNT:
        del sent["max_tokens"]
    await ask(http, sent, path)
    assert threads
    assert threading.get_ident() not in threads


async def test_more_turns_and_results_than_a_chat_may_have_are_refused(engine: Any) -> None:
    results = [{"type": "tool_result", "tool_use_id": ""}] * (MAX_MESSAGES + 1)
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(PATH, json=body({"role": "user", "content": results}))
    assert answer.status_code == 400
    assert str(MAX_MESSAGES) in answer.json()["error"]["message"]
