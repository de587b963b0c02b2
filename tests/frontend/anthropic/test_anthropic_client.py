"""What users of Anthropic's official client see. Nothing here depends on which model answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import anthropic  # takes two seconds, which each worker of pytest would spend

TURNS: Any = [{"role": "user", "content": "Say something about the sea."}]
TOO_COLD = {"temperature": -1}
"""The client has no argument for it; servers of other models have a use for it."""
CALL = '<tool_call>{"name": "f", "arguments": {"x": "<b>"}}</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
TOOLS: Any = [
    {"name": "f", "description": "d", "input_schema": {"type": "object"}},
    {"name": "g", "input_schema": {"type": "object"}, "type": "custom"},
]


@pytest.fixture
def client(base_url: str) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_has_its_usage_and_why_it_ended(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(model=model, messages=TURNS, max_tokens=8)
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    [block] = message.content
    assert block.type == "text"
    assert block.text == "user: Sa"
    usage = message.usage
    prompt = "user: Say something about the sea.\nassistant: "
    assert usage.cache_read_input_tokens == len(prompt) // 2
    assert usage.input_tokens == len(prompt) - len(prompt) // 2
    assert usage.output_tokens == 8
    assert message._request_id == message.id.removeprefix("msg_")


def test_a_stream_is_the_whole_message_in_events(client: anthropic.Anthropic, model: str) -> None:
    whole = client.messages.create(model=model, messages=TURNS, max_tokens=12)
    with client.messages.stream(model=model, messages=TURNS, max_tokens=12) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * 12,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert [block.to_dict() for block in final.content] == [
        block.to_dict() for block in whole.content
    ]
    assert final.usage == whole.usage
    assert final.stop_reason == whole.stop_reason


@pytest.mark.parametrize("stream", [False, True])
def test_generation_ends_before_a_stop_sequence(
    client: anthropic.Anthropic, model: str, stream: bool
) -> None:
    asked: Any = {
        "model": model, "messages": TURNS, "max_tokens": 40, "stop_sequences": ["zzz", "thing"],
    }  # fmt: skip
    if stream:
        with client.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert [block.text for block in message.content if block.type == "text"] == ["user: Say some"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "thing")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_blocks(client: anthropic.Anthropic, model: str, stream: bool) -> None:
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": f"{CALL}\t{OTHER}"}],
        "tools": TOOLS,
        "max_tokens": 500,
        "stop_sequences": ["\n"],
    }
    if stream:
        with client.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    text, first, second = message.content
    assert text.type == "text"
    assert first.type == second.type == "tool_use"
    assert (text.text, first.name, second.name) == ("user: ", "f", "g")
    assert (first.input, second.input) == ({"x": "<b>"}, {})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert message.stop_reason == "tool_use"


def test_one_call_if_the_client_wants_one(client: anthropic.Anthropic, model: str) -> None:
    message = client.messages.create(
        model=model,
        messages=[{"role": "user", "content": CALL + OTHER}],
        tools=TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        max_tokens=500,
        stop_sequences=["\n"],
    )
    assert [block.name for block in message.content if block.type == "tool_use"] == ["f"]


def test_a_conversation_is_counted_as_it_is_answered(
    client: anthropic.Anthropic, model: str
) -> None:
    counted = client.messages.count_tokens(model=model, messages=TURNS, system="Be brief.")
    message = client.messages.create(model=model, messages=TURNS, system="Be brief.", max_tokens=1)
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached


def test_what_is_wrong_is_told_as_the_client_knows_it(
    client: anthropic.Anthropic, model: str
) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
        client.messages.create(model=model, messages=TURNS, max_tokens=8, extra_body=TOO_COLD)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nobody", messages=TURNS, max_tokens=8)
    assert unknown.value.type == "not_found_error"


async def test_the_asynchronous_client_streams(base_url: str, model: str) -> None:
    import anthropic

    async with (
        anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0) as client,
        client.messages.stream(model=model, messages=TURNS, max_tokens=8) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == "user: Sa"
