"""Calls of tools, told as the OpenAI API tells them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from diptych_frontend.text.templates.chat_template import ChatTemplate

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<b>"}}\n</tool_call>'
ONE_LINE = CALL.replace("\n", "")
OTHER = '<tool_call>{"name": "g", "parameters": {}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}},
    {"type": "function", "function": {"name": "g"}},
]


def echo(text: str, **changes: Any) -> dict[str, Any]:
    """A request that the echoing engine answers with `user: ` and the text, up to its newline."""
    messages = [{"role": "user", "content": text}]
    fields = {"model": "echo", "messages": messages, "tools": TOOLS, "stop_token_ids": [10]}
    return {**fields, "max_tokens": 500, **changes}


async def test_contract_C05_a_call_is_told_in_a_whole_answer(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=echo(f"{ONE_LINE}{OTHER}"))
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "user:"
    [first, second] = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"x":"<b>"}'}
    assert second["function"]["name"] == "g"
    assert first["id"] != second["id"]


async def test_contract_C05_without_tools_a_call_is_text(http: httpx.AsyncClient) -> None:
    for changes in ({"tools": None}, {"tool_choice": "none"}):
        answer = await http.post("/v1/chat/completions", json=echo(OTHER, **changes))
        [choice] = answer.json()["choices"]
        assert OTHER in choice["message"]["content"]
        assert "tool_calls" not in choice["message"]


def test_contract_C05_the_official_client_reads_streamed_calls(base_url: str) -> None:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        arguments = echo(f"{ONE_LINE}{OTHER}")
        extra = {"stop_token_ids": arguments.pop("stop_token_ids")}
        chunks = list(client.chat.completions.create(**arguments, stream=True, extra_body=extra))
    calls: dict[int, Any] = {}
    content, reasons = "", []
    for chunk in chunks:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            calls[call.index] = call
    assert [calls[i].function.name for i in (0, 1)] == ["f", "g"]
    assert json.loads(calls[0].function.arguments) == {"x": "<b>"}
    assert content == "user: "
    assert reasons == ["tool_calls"]


async def test_contract_C05_the_conversation_with_calls_reaches_the_template(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client sends back: the call, and what came of it."""
    seen: list[Any] = []
    render = engine.renderer.render_chat

    def spy(messages: Any, **options: Any) -> Any:
        seen.append((messages, options))
        return render(messages, **options)

    monkeypatch.setattr(engine.renderer, "render_chat", spy)
    function = {"name": "f", "arguments": '{"x": 1}'}
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant", "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]  # fmt: skip
    body = {"model": "echo", "messages": messages, "tools": TOOLS, "max_tokens": 1}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    [(rendered, options)] = seen
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert rendered[2] == {"role": "tool", "content": "42", "tool_call_id": "call_1"}
    assert options["tools"] == TOOLS


def test_contract_C05_a_template_sees_the_tools() -> None:
    source = "{% for t in tools %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    template = ChatTemplate(source, "", "")
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages, add_generation_prompt=True, tools=TOOLS) == "f;g;hi"
