"""What users of the official client's `responses` see. Nothing depends on which model answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

TEXT = "Say something about the sea."
CALL = '<tool_call>{"name": "f", "arguments": {"x": "<b>"}}</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}},
    {"type": "function", "name": "g", "parameters": None},
]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text_is_answered_with_usage(client: openai.OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input=TEXT, max_output_tokens=8)
    assert response.object == "response"
    assert response.id.startswith("resp_")
    assert response.output_text == "user: Sa"
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    [message] = response.output
    assert message.type == "message"
    assert message.status == "incomplete"
    usage = response.usage
    assert usage is not None
    prompt = len(f"user: {TEXT}\nassistant: ")
    assert (usage.input_tokens, usage.output_tokens) == (prompt, 8)
    assert usage.total_tokens == prompt + 8
    assert usage.input_tokens_details.cached_tokens == prompt // 2


def test_what_a_response_was_asked_can_be_read_again(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input=TEXT, max_output_tokens=4, store=True)
    second = client.responses.create(
        model=model, input="And now?", max_output_tokens=4, store=True,
        previous_response_id=first.id,
    )  # fmt: skip
    asked = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    said = [(item.role, item.content[0].text) for item in asked if item.type == "message"]  # type: ignore[union-attr]
    assert said == [("user", TEXT), ("assistant", first.output_text), ("user", "And now?")]
    assert len({item.id for item in asked}) == 3
    newest_first = list(client.responses.input_items.list(second.id))
    assert [item.id for item in newest_first] == [item.id for item in reversed(asked)]


def test_tokens_are_counted(client: openai.OpenAI, model: str) -> None:
    counted = client.responses.input_tokens.count(model=model, input=TEXT)
    assert counted.input_tokens == len(f"user: {TEXT}\nassistant: ")


def test_a_stream_is_the_whole_response_in_numbered_events(
    client: openai.OpenAI, model: str
) -> None:
    whole = client.responses.create(model=model, input=TEXT, max_output_tokens=6)
    with client.responses.create(
        model=model, input=TEXT, max_output_tokens=6, stream=True
    ) as stream:
        events = list(stream)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 6,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_items(client: openai.OpenAI, model: str, stream: bool) -> None:
    asked: Any = {"model": model, "input": f"{CALL}{OTHER}", "tools": TOOLS}
    asked["max_output_tokens"] = len(f"user: {CALL}{OTHER}")
    if stream:
        with client.responses.create(**asked, stream=True) as events:
            items = [e.item for e in events if e.type == "response.output_item.done"]
    else:
        items = client.responses.create(**asked).output
    message, first, second = items
    assert message.type == "message"
    assert first.type == second.type == "function_call"
    assert (first.name, second.name) == ("f", "g")
    assert json.loads(first.arguments) == {"x": "<b>"}
    assert (first.status, second.arguments) == ("completed", "{}")
    assert len({first.call_id, second.call_id, first.id, second.id}) == 4


def test_a_stored_response_is_gone_on_with_read_and_deleted(
    client: openai.OpenAI, model: str
) -> None:
    first = client.responses.create(model=model, input="one", max_output_tokens=9)
    again = client.responses.retrieve(first.id)
    assert again.to_dict() == first.to_dict()
    second = client.responses.create(
        model=model, input="two", max_output_tokens=1, previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    conversation = f"user: one\nassistant: {first.output_text}\nuser: two\nassistant: "
    assert second.usage.input_tokens == len(conversation)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(
        model=model, input="three", max_output_tokens=1, previous_response_id=second.id
    )
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input="x", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id", "previous_response_not_found",
    )  # fmt: skip


def test_nothing_is_stored_if_that_is_asked_for(client: openai.OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="one", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_streamed_response_is_stored_too(client: openai.OpenAI, model: str) -> None:
    with client.responses.create(
        model=model, input="one", max_output_tokens=5, stream=True
    ) as stream:
        *_, last = stream
    assert last.type == "response.incomplete"
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_what_is_wrong_is_refused_by_name(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input=TEXT, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nobody", input=TEXT)
