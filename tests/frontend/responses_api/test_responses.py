"""/v1/responses: how items become a chat, how answers and failures are told, what is stored."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases import each
from engine_kit.echo_engine import EOS

from diptych_frontend.app import build_app
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.request_workers import INLINE_BYTES
from diptych_frontend.responses_api.store import ResponseStore, StoredResponse
from diptych_protocol import EngineGenerateError, EngineOverloadedError, StructuredOutputsParams

PATH = "/v1/responses"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
REASONING, ANSWER = "hm, < so ", "Hello </think> there"
THOUGHT = f"<think>\n{REASONING}</think>\n\n{ANSWER}"
OUTPUT_TEXT = {"type": "output_text", "text": "let me", "annotations": [], "logprobs": []}
CALL = {
    "type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x": 1}',
    "status": "completed",
}  # fmt: skip
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THINKING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "so"}],
    "status": "completed",
}


def body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "input": content, "max_output_tokens": 5, **fields}


async def ask(http: httpx.AsyncClient, sent: dict[str, Any], path: str = PATH) -> Any:
    answer = await http.post(path, json=sent)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[Any]:
    """The data of a stream's events, whose names and numbers are as they must be."""
    found = []
    for number, block in enumerate(text.strip().split("\n\n")):
        name, line = block.split("\n")
        data = json.loads(line.removeprefix("data: "))
        assert data["type"] == name.removeprefix("event: ")
        assert data["sequence_number"] == number
        found.append(data)
    return found


@pytest.fixture
def rendered(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the chat template is given. The engine answers with the last message and its
    own end."""
    seen: list[Any] = []

    def render(messages: list[dict[str, Any]], **options: Any) -> Any:
        seen.append((messages, options))
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else "image"
        return engine.renderer.render_prompt([*text.encode(), EOS])

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


@pytest.mark.parametrize(
    ("sent", "messages"),
    [
        (body("hi"), [USER]),
        (body([USER]), [USER]),
        (body([USER | {"type": "message"}]), [USER]),
        (body("hi", instructions="Be brief."), [{"role": "system", "content": "Be brief."}, USER]),
        (
            body([{"role": "developer", "content": "Go."}, USER]),
            [{"role": "system", "content": "Go."}, USER],
        ),
        (
            body(
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "see"},
                            {"type": "input_image", "image_url": "data:,", "detail": "auto"},
                        ],
                    }
                ]
            ),
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {"type": "image_url", "image_url": {"url": "data:,", "detail": None}},
                    ],
                }
            ],
        ),
        (
            body(
                [
                    USER,
                    THINKING,
                    {"type": "message", "id": "m", "role": "assistant", "content": [OUTPUT_TEXT]},
                    CALL,
                    RESULT,
                    {"role": "user", "content": "and now?"},
                ]
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
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": {"x": 1}},
                        }
                    ],
                },
                {"role": "tool", "content": "42", "tool_call_id": "c1"},
                {"role": "user", "content": "and now?"},
            ],
        ),
    ],
    ids=["a text", "a message", "a typed message", "instructions", "developer", "image", "calls"],
)
async def test_items_become_a_chat(
    http: httpx.AsyncClient, rendered: list[Any], sent: dict[str, Any], messages: list[Any]
) -> None:
    answer = await http.post(PATH, json=sent)
    assert rendered, answer.text
    assert rendered[0][0] == messages


async def test_options_reach_the_engine_and_are_told(http: httpx.AsyncClient, engine: Any) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    asked = body(
        temperature=0.5, top_p=0.9, priority=3, cache_salt="s", text=text, user="me",
        metadata={"k": "v"}, instructions="Go.", truncation="disabled", include=[],
    )  # fmt: skip
    told = await ask(http, asked)
    [(_, params, priority, prompt)] = engine.seen
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 5)
    assert params.structured_outputs == StructuredOutputsParams(json=SCHEMA)
    assert (priority, prompt["cache_salt"]) == (3, "s")
    assert (told["temperature"], told["top_p"], told["metadata"]) == (0.5, 0.9, {"k": "v"})
    assert told["text"]["format"]["schema"] == SCHEMA
    assert (told["instructions"], told["store"], told["tool_choice"]) == ("Go.", True, "auto")


async def test_what_vllm_takes_with_responses_is_taken(
    strict_http: httpx.AsyncClient, engine: Any, rendered: list[Any]
) -> None:
    asked = {
        "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "repetition_penalty": 1.5, "seed": 7, "stop": ["x"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    variables = {"enable_thinking": False}
    form = {"choice": ["a", "b"]}
    others = {"logit_bias": {"5": 1.5}, "structured_outputs": form, "include_reasoning": False}
    told = await strict_http.post(
        PATH, json=body(**asked, **others, chat_template_kwargs=variables)
    )
    assert told.status_code == 200, told.text
    [(_, params, _, _)] = engine.seen
    assert {name: getattr(params, name) for name in asked} == asked
    assert (params.logit_bias, params.structured_outputs.choice) == ({5: 1.5}, ["a", "b"])
    assert rendered[0][1]["template_kwargs"] == variables


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
async def test_a_forced_call_is_a_form(http: httpx.AsyncClient, engine: Any, choice: Any) -> None:
    told = await ask(http, body(tools=[TOOL], tool_choice=choice))
    [(_, params, _, _)] = engine.seen
    assert '\\"name\\": \\"f\\"' in params.structured_outputs.grammar
    assert told["tool_choice"] == choice
    assert told["tools"][0]["name"] == "f"


@each(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [RESULT | {"call_id": None}]}, "input"),
        ({"input": [USER] * 5000}, "input"),
        ({"input": [CALL | {"arguments": "{"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "odd"}}}},
            "text",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"loudly": True}, "loudly"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    strict_http: httpx.AsyncClient, changes: dict[str, Any], param: str
) -> None:
    answer = await strict_http.post(PATH, json=body(**changes))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "messages[" not in answer.text


async def test_a_refusal_is_told_as_by_other_routes(http: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = EngineOverloadedError("full")
    answer = await http.post(PATH, json=body(stream=True))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"
    assert "retry-after" in answer.headers


async def test_a_failure_in_a_stream_is_its_last_event(
    http: httpx.AsyncClient, engine: Any
) -> None:
    engine.failure = EngineGenerateError("the engine was lost")
    answer = await http.post(PATH, json=body(stream=True, store=True))
    *_, last = events(answer.text)
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "the engine was lost"}
    assert (await http.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_an_answer_that_ends_by_itself_is_complete(
    http: httpx.AsyncClient, rendered: list[Any]
) -> None:
    told = await ask(http, body(max_output_tokens=500))
    assert (told["status"], told["incomplete_details"]) == ("completed", None)
    answer = await http.post(PATH, json=body(max_output_tokens=500, stream=True))
    assert events(answer.text)[-1]["type"] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_of_its_own(
    thinking: httpx.AsyncClient, rendered: list[Any], stream: bool
) -> None:
    sent = body(THOUGHT, max_output_tokens=500, stream=stream)
    answer = await thinking.post(PATH, json=sent)
    if stream:
        told = events(answer.text)
        deltas = [e["delta"] for e in told if e["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == REASONING
        response = told[-1]["response"]
    else:
        response = answer.json()
    reasoning, message = response["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": REASONING}]
    assert message["content"][0]["text"] == ANSWER
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    sent = body([{"role": "user", "content": "a"}, *response["output"], USER])
    await ask(thinking, sent)
    assert rendered[-1][0][1]["reasoning_content"] == REASONING


async def test_reasoning_may_be_turned_off(
    thinking: httpx.AsyncClient, rendered: list[Any]
) -> None:
    sent = body(THOUGHT, max_output_tokens=500, reasoning={"effort": "none"})
    told = await ask(thinking, sent)
    [message] = told["output"]
    assert message["content"][0]["text"] == THOUGHT
    assert rendered[0][1]["template_kwargs"] == {"enable_thinking": False}


async def test_what_takes_long_is_done_beside_the_event_loop(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    render = engine.renderer.render_chat

    def noted(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return render(*args, **options)

    monkeypatch.setattr(engine.renderer, "render_chat", noted)
    engine.max_model_len = 10 * INLINE_BYTES
    await ask(http, body("a" * INLINE_BYTES))
    assert threads
    assert threading.get_ident() not in threads


async def test_a_stored_response_is_its_tenants(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "alice").write_text("sesame")
    (tmp_path / "bob").write_text("open-up")
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("sesame", "open-up"))
    transport = httpx.ASGITransport(build_app(engine, api_keys=ApiKeys(tmp_path)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        kept = (await http.post(PATH, json=body(store=True), headers=alice)).json()
        path, goes_on = f"{PATH}/{kept['id']}", body(previous_response_id=kept["id"])
        assert (await http.get(path, headers=bob)).status_code == 404
        assert (await http.delete(path, headers=bob)).status_code == 404
        assert (await http.post(PATH, json=goes_on, headers=bob)).status_code == 400
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers=alice)).json() == kept
        assert (await http.get(f"{path}/input_items", headers=bob)).status_code == 404
        assert (await http.get(f"{path}/input_items", headers=alice)).status_code == 200
        assert (await http.post(PATH, json=goes_on, headers=alice)).status_code == 200
        assert (await http.delete(path, headers=alice)).json()["deleted"] is True
        assert (await http.delete(path, headers=alice)).status_code == 404


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=%D9%A3", "limit"),
        ("order=up", "order"),
        ("after=msg_1", "after"),
    ],
)
async def test_a_wrong_parameter_of_input_items_is_named(
    http: httpx.AsyncClient, query: str, param: str
) -> None:
    kept = (await http.post(PATH, json=body(store=True))).json()
    answer = await http.get(f"{PATH}/{kept['id']}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tokens_of_a_prompt_are_counted_as_they_are_used(
    http: httpx.AsyncClient, engine: Any
) -> None:
    sent = body([USER, {"role": "assistant", "content": "b"}, USER], instructions="Go.")
    counted = await ask(http, sent, f"{PATH}/input_tokens")
    assert counted["object"] == "response.input_tokens"
    await ask(http, sent)
    [(_, _, _, prompt)] = engine.seen
    assert counted["input_tokens"] == len(prompt["prompt_token_ids"])
    refused = await http.post(f"{PATH}/input_tokens", json=body(model="nobody"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
    refused = await http.post(f"{PATH}/input_tokens", json=body(background=True))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"", (), 0, size)


def test_a_full_store_forgets_the_oldest_of_who_has_the_most() -> None:
    store = ResponseStore(max_bytes=10)
    store.put("bob", "b1", stored(3))
    for name in ("a1", "a2", "a3"):
        store.put("alice", name, stored(3))
    assert store.get("bob", "b1")
    assert [store.get("alice", name) is not None for name in ("a1", "a2", "a3")] == [
        False, True, True,
    ]  # fmt: skip
    store.put("alice", "a4", stored(11))
    assert [store.get("alice", name) for name in ("a2", "a3", "a4")] == [None] * 3
    assert store.get("bob", "b1")
    store.put("bob", "b1", stored(10))
    assert store.get("bob", "b1") == stored(10)
    assert store.delete("bob", "b1")
    assert not store.delete("bob", "b1")
