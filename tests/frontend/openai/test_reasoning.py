"""Reasoning in chats: told apart from the answer, counted, and sent back by clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from diptych_frontend.app import build_app

PATH = "/v1/chat/completions"
REASONING, ANSWER = "hm, < so ", "Hello </think> there"
THOUGHT = f"<think>\n{REASONING}</think>\n\n{ANSWER}"
NUM_REASONING_TOKENS = len(THOUGHT.encode()) - len(f"\n\n{ANSWER}")
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture
def rendered(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engine answers with the last message, up to its end; what templates are given."""
    seen: list[Any] = []

    def render(messages: list[dict[str, Any]], **options: Any) -> Any:
        seen.append((messages, options))
        return engine.renderer.render_prompt(messages[-1]["content"] + "\0")

    monkeypatch.setattr(engine.renderer, "render_chat", render)
    return seen


@pytest.fixture
async def chat(engine: Any, rendered: list[Any]) -> AsyncIterator[httpx.AsyncClient]:
    engine.reasoning_parser = "think"
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def body(text: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": "echo", "messages": messages, "stop": "\0", "max_tokens": 500, **changes
    }  # fmt: skip


async def answer(chat: httpx.AsyncClient, text: str, **changes: Any) -> Any:
    response = await chat.post(PATH, json=body(text, **changes))
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(chat: httpx.AsyncClient, text: str, **changes: Any) -> list[Any]:
    response = await chat.post(PATH, json=body(text, stream=True, **changes))
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_contract_C05_a_whole_answer_tells_reasoning_and_answer_apart(
    chat: httpx.AsyncClient,
) -> None:
    told = await answer(chat, THOUGHT)
    [choice] = told["choices"]
    assert choice["message"]["reasoning_content"] == REASONING
    assert choice["message"]["content"] == ANSWER
    details = told["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": NUM_REASONING_TOKENS}
    assert told["usage"]["completion_tokens"] > NUM_REASONING_TOKENS


async def test_contract_C05_a_stream_tells_reasoning_and_answer_apart(
    chat: httpx.AsyncClient,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = await chunks(chat, THOUGHT, stream_options=options)
    deltas = [chunk["choices"][0]["delta"] for chunk in told if chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == REASONING
    assert "".join(delta["content"] for delta in deltas) == ANSWER
    assert not any(delta["content"] and "reasoning_content" in delta for delta in deltas)
    counts = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in told]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == NUM_REASONING_TOKENS


async def test_contract_C05_several_answers_are_told_apart_each_by_itself(
    chat: httpx.AsyncClient,
) -> None:
    """The second begins one byte later: it opens no reasoning."""
    told = await answer(chat, THOUGHT, n=2)
    [first, second] = [choice["message"] for choice in told["choices"]]
    assert first["reasoning_content"] == REASONING
    assert "reasoning_content" not in second
    assert second["content"] == THOUGHT[1:]
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == NUM_REASONING_TOKENS


async def test_contract_C05_reasoning_may_be_left_out(chat: httpx.AsyncClient) -> None:
    told = await answer(chat, THOUGHT, include_reasoning=False)
    message = told["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == ANSWER
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == NUM_REASONING_TOKENS
    streamed = await chunks(chat, THOUGHT, include_reasoning=False)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert "".join(delta["content"] for delta in deltas) == ANSWER
    assert not any("reasoning_content" in delta for delta in deltas)


async def test_contract_C05_calls_are_read_in_the_answer_only(chat: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    told = await answer(chat, f"<think>or {CALL}?</think>{CALL}", tools=tools)
    [choice] = told["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == f"or {CALL}?"
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]


async def test_contract_C05_without_the_setting_all_text_is_the_answer(
    http: httpx.AsyncClient, rendered: list[Any]
) -> None:
    told = await answer(http, THOUGHT)
    assert told["choices"][0]["message"]["content"] == THOUGHT
    assert "reasoning_content" not in told["choices"][0]["message"]
    assert "completion_tokens_details" not in told["usage"]


async def test_contract_C05_a_template_that_was_told_not_to_think_has_only_an_answer(
    chat: httpx.AsyncClient, rendered: list[Any]
) -> None:
    kwargs = {"enable_thinking": False, "style": {"tone": ["dry"]}}
    told = await answer(chat, THOUGHT, chat_template_kwargs=kwargs)
    assert told["choices"][0]["message"]["content"] == THOUGHT
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    [(_, options)] = rendered
    assert options["template_kwargs"] == kwargs


async def test_contract_C05_what_the_engine_is_told_of_the_reasoning(
    chat: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat leaves it to the prompt and to its template's variables; a completion has none."""
    seen: list[Any] = []
    generate = engine.generate

    def spy(*args: Any, **options: Any) -> Any:
        names = ("reasoning_ended", "reasoning_parser_kwargs")
        seen.append(tuple(map(options.get, names)))
        return generate(*args, **options)

    monkeypatch.setattr(engine, "generate", spy)
    await answer(chat, "hi", chat_template_kwargs={"enable_thinking": True})
    await answer(chat, "hi")
    completion = {"model": "echo", "prompt": "hi", "max_tokens": 2}
    assert (await chat.post("/v1/completions", json=completion)).status_code == 200
    assert seen == [
        (None, {"chat_template_kwargs": {"enable_thinking": True}}),
        (None, {"chat_template_kwargs": {}}),
        (True, None),
    ]


async def test_contract_C05_reasoning_that_a_client_sends_back_reaches_the_template(
    chat: httpx.AsyncClient, rendered: list[Any]
) -> None:
    said = {"role": "assistant", "content": "Hello", "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "a"}, said, {"role": "user", "content": "b"}]
    await answer(chat, "", messages=messages)
    [(given, _)] = rendered
    assert given[1] == {**said, "thinking": "hm"}
    assert given[2] == messages[2]
    messages[0]["reasoning_content"] = "hm"
    refused = await chat.post(PATH, json=body("", messages=messages))
    assert refused.status_code == 400
    assert "messages[0].reasoning_content" in refused.json()["error"]["message"]


def test_contract_C05_the_official_client_reads_what_is_new(base_url: str) -> None:
    """A server that looks for no reasoning takes the fields, too."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        told = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=4,
            extra_body={"include_reasoning": True, "chat_template_kwargs": {"a": 1}},
        )
    assert told.choices[0].message.content == "user"
