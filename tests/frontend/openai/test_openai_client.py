"""What users of the official client see. Nothing here depends on which model answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypedDict

import openai
import pytest

CHAT: Any = [{"role": "user", "content": "Say something about the sea."}]
PROMPT = "Once upon a time there was"


class CompletionArguments(TypedDict):
    """Arguments of a completion, streamed or not."""

    model: str
    prompt: str | list[str]
    temperature: float
    max_tokens: int


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_model_is_listed_under_its_name(client: openai.OpenAI, model: str) -> None:
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_chat_answers_with_usage_and_finish_reason(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=CHAT, max_tokens=8)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_is_the_whole_chat_in_pieces(
    client: openai.OpenAI, model: str, n: int
) -> None:
    whole = client.chat.completions.create(
        model=model, messages=CHAT, max_completion_tokens=12, temperature=0, n=n
    )
    with client.chat.completions.create(
        model=model,
        messages=CHAT,
        max_completion_tokens=12,
        temperature=0,
        n=n,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    texts = [""] * n
    roles: list[list[str]] = [[] for _ in range(n)]
    reasons: list[list[str]] = [[] for _ in range(n)]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles[choice.index].append(choice.delta.role)
            if choice.finish_reason:
                reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [["assistant"]] * n
    assert reasons == [["length"]] * n
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_completions_take_texts_and_token_ids_in_batches(client: openai.OpenAI, model: str) -> None:
    one = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=6)
    batch = client.completions.create(
        model=model, prompt=[PROMPT, PROMPT], temperature=0, max_tokens=6, n=2
    )
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert batch.choices[0].text == batch.choices[2].text == one.choices[0].text
    assert one.usage is not None
    assert batch.usage is not None
    assert batch.usage.prompt_tokens == 2 * one.usage.prompt_tokens
    assert batch.usage.completion_tokens == 4 * 6
    for prompt, answers in (([5, 6, 7], 1), ([[5, 6, 7], [8, 9]], 2)):
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=2)
        assert len(answer.choices) == answers


def test_a_batch_streams_all_its_choices(client: openai.OpenAI, model: str) -> None:
    arguments: CompletionArguments = {
        "model": model,
        "prompt": [PROMPT, "Another"],
        "temperature": 0,
        "max_tokens": 9,
    }
    whole = client.completions.create(**arguments)
    texts = ["", ""]
    with client.completions.create(**arguments, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_generation_ends_before_a_stop_string(
    client: openai.OpenAI, model: str, stream: bool
) -> None:
    arguments: CompletionArguments = {
        "model": model,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.completions.create(**arguments).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    if stream:
        with client.completions.create(**arguments, stop=[stop], stream=True) as chunks:
            choices = [chunk.choices[0] for chunk in chunks]
        text, last = "".join(choice.text for choice in choices), choices[-1]
    else:
        last = client.completions.create(**arguments, stop=stop).choices[0]
        text = last.text
    assert text == whole[: whole.index(stop)]
    assert last.finish_reason == "stop"
    assert last.model_extra is not None
    assert last.model_extra["stop_reason"] == stop


def test_chat_logprobs_rank_the_alternatives(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=CHAT, max_tokens=5, logprobs=True, top_logprobs=3, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for position in logprobs.content:
        values = [entry.logprob for entry in position.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert position.logprob <= 0
        assert position.bytes == list(position.token.encode())


def test_completion_logprobs_line_up_with_the_text(client: openai.OpenAI, model: str) -> None:
    arguments: CompletionArguments = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
    }
    choice = client.completions.create(**arguments, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:i])) for i in range(len(logprobs.tokens))
    ]
    assert logprobs.top_logprobs is not None
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value
    with client.completions.create(**arguments, logprobs=2, stream=True) as stream:
        pieces = [chunk.choices[0].logprobs for chunk in stream]
    offsets = [offset for piece in pieces if piece for offset in piece.text_offset or []]
    assert offsets == logprobs.text_offset


def test_a_wrong_parameter_is_a_bad_request_that_names_it(
    client: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=CHAT, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.completions.create(model="nobody", prompt="x"),
        lambda: client.models.retrieve("nobody"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_many_async_streams_do_not_mix(base_url: str, model: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0
    ) as client:

        async def collect(prompt: str) -> str:
            stream = await client.completions.create(
                model=model, prompt=prompt, max_tokens=20, temperature=0, stream=True
            )
            async with stream:
                return "".join([chunk.choices[0].text async for chunk in stream])

        prompts = [f"Story {i} begins" for i in range(8)]
        together = await asyncio.gather(*map(collect, prompts))
        alone = [await collect(prompt) for prompt in prompts]
    assert together == alone
