"""Messages as client libraries send them back, with fields that they have added."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from engine_kit.echo_engine import EchoEngine

CALL = {
    "id": "call_1", "type": "function", "index": 0,
    "function": {"name": "look", "arguments": "{}", "parsed_arguments": {}},
}  # fmt: skip
CONVERSATIONS: dict[str, tuple[str, dict[str, Any], int]] = {
    "pieces of a streamed call, and a parsed answer": (
        "/v1/chat/completions",
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "annotations": []}]},
            {"role": "assistant", "parsed": None, "provider_specific_fields": {"refusal": None},
             "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "x", "is_error": False},
        ]},
        6,
    ),
    "a block of Anthropic's": (
        "/v1/messages",
        {"max_tokens": 4, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "stop_reason": None}]},
        ]},
        1,
    ),
    "an item of Responses'": (
        "/v1/responses",
        {"input": [{"role": "user", "content": "hi", "created_by": "me"}]},
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_what_clients_add_to_messages_is_left_out(
    http: httpx.AsyncClient, engine: EchoEngine, name: str
) -> None:
    path, body, number = CONVERSATIONS[name]
    answer = await http.post(path, json={"model": "echo", **body})
    assert answer.status_code == 200, answer.text
    # Items of Responses are read later, and not counted.
    metrics = (await http.get("/metrics")).text
    assert f'diptych:ignored_fields_total{{model_name="echo"}} {number}.0' in metrics
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"messages": [{"role": "user", "content": "", "odd": 1}], "stop": 5}, "stop"),
        ({"messages": [{"role": "judge", "content": "hi", "odd": 1}]}, "messages"),
        ({"messages": [{"content": "hi", "odd": 1}]}, "messages"),
        ({"messages": [{"role": "user", "content": "hi", "odd": 10**40}], "seed": 10**40}, "seed"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "odd": 1}]}, "tools"),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_is_still_refused(
    http: httpx.AsyncClient, change: dict[str, Any], field: str
) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], **change}
    answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
