"""APIs beside chats and completions, through a router, a prefill engine and a decode engine, with
official clients and vLLM's shapes."""

from __future__ import annotations

import json
import operator
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import pytest_asyncio
from model_kit.questions import WHOLE
from waits import PATIENCE_S

if TYPE_CHECKING:
    import anthropic  # takes two seconds, which each worker of pytest would spend

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = {"temperature": 0}
TURNS: Any = [{"role": "user", "content": WHOLE.words}]
RAIN = {
    "type": "object",
    "properties": {"rain": {"type": "boolean"}},
    "required": ["rain"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(base_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_a_prompt_has_the_tokens_that_tokenize_counts(http: httpx.AsyncClient) -> None:
    for path, field in (("completions", "prompt"), ("chat/completions", "messages")):
        prompt = {field: WHOLE.words if field == "prompt" else TURNS}
        counted = (await http.post("/tokenize", json=prompt)).json()
        body = {"model": "smollm2", "max_tokens": 1, **prompt}
        answer = (await http.post(f"/v1/{path}", json=body)).json()
        assert counted["count"] == answer["usage"]["prompt_tokens"]
        text = (await http.post("/detokenize", json={"tokens": counted["tokens"]})).json()
        assert WHOLE.words in text["prompt"]


async def test_scores_are_the_cosines_of_embeddings(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    texts = ["The sea is calm.", "The ocean is calm.", "1, 2, 3"]
    embedded = await client.embeddings.create(model="smollm2", input=texts)
    query, *others = [each.embedding for each in embedded.data]
    cosines = [sum(map(operator.mul, query, other)) for other in others]
    body: dict[str, Any] = {"model": "smollm2", "queries": texts[0], "documents": texts[1:]}
    scored = (await http.post("/v1/score", json=body)).json()
    assert [each["score"] for each in scored["data"]] == pytest.approx(cosines, abs=1e-3)
    body = {"model": "smollm2", "query": texts[0], "documents": texts[1:], "top_n": 1}
    [best] = (await http.post("/v1/rerank", json=body)).json()["results"]
    assert best["document"]["text"] == texts[1]
    assert best["relevance_score"] == pytest.approx(max(cosines), abs=1e-3)


async def test_anthropics_client_gets_the_models_answer(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(
        model="smollm2", messages=TURNS, max_tokens=40, extra_body=GREEDY
    )
    [block] = message.content
    assert block.type == "text"
    assert block.text == WHOLE.answer
    assert message.stop_reason == "end_turn"
    counted = await claude.messages.count_tokens(model="smollm2", messages=TURNS)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_anthropics_client_lets_an_answer_go_on(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(
        model="smollm2",
        max_tokens=4,
        messages=[*TURNS, {"role": "assistant", "content": "The capital of France is"}],
        extra_body=GREEDY,
    )
    [block] = message.content
    assert block.type == "text"
    assert block.text.strip().startswith("Paris")


async def test_anthropics_client_streams_the_models_answer(
    claude: anthropic.AsyncAnthropic,
) -> None:
    async with claude.messages.stream(
        model="smollm2", messages=TURNS, max_tokens=40, extra_body=GREEDY
    ) as stream:
        pieces = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == WHOLE.answer
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens >= len(pieces)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_client_gets_a_call_that_fits_its_schema(
    claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    asked: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
        "max_tokens": 100,
        "extra_body": GREEDY,
    }
    if stream:
        async with claude.messages.stream(**asked) as events:
            message = await events.get_final_message()
    else:
        message = await claude.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    [use] = message.content
    assert use.type == "tool_use"
    assert use.name == "weather"
    assert set(use.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [*asked["messages"], {"role": "assistant", "content": message.content}]
    turns.append({"role": "user", "content": [result]})
    after = await claude.messages.create(model="smollm2", messages=turns, max_tokens=5)
    assert after.usage.output_tokens > 0


async def test_anthropics_client_gets_output_of_a_schema(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Will it rain?"}],
        output_config={"format": {"type": "json_schema", "schema": RAIN}},
        max_tokens=60,
        extra_body=GREEDY,
    )
    [block] = message.content
    assert block.type == "text"
    assert json.loads(block.text) in ({"rain": True}, {"rain": False})


async def test_openais_client_gets_responses_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "smollm2", "input": WHOLE.words, "temperature": 0}
    whole = await client.responses.create(**asked, max_output_tokens=40)
    assert (whole.output_text, whole.status) == (WHOLE.answer, "completed")
    async with client.responses.stream(**asked, max_output_tokens=40) as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        last = await stream.get_final_response()
    assert len(deltas) > 1
    assert "".join(deltas) == last.output_text == WHOLE.answer
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


OPEN_WEBUI: dict[str, dict[str, Any]] = {
    # As its backend sends them: routers/openai.py and tasks.py, utils/payload.py, November 2026.
    "a chat": {
        "stream": True, "messages": TURNS, "stream_options": {"include_usage": True},
        "temperature": 0.0, "top_p": 0.9, "min_p": 0.0, "max_tokens": 40, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "seed": 1, "stop": ["###"], "logit_bias": {}, "user": None,
    },
    "settings of Ollama": {
        "stream": True, "messages": TURNS, "temperature": 0.0, "max_tokens": 40,
        "repeat_penalty": 1.1, "num_ctx": 4096, "keep_alive": "5m", "think": False,
    },
    "a title": {
        "stream": False, "temperature": 0.0, "max_completion_tokens": 40, "messages": TURNS,
    },
    "after a call": {
        "stream": True, "temperature": 0.0, "max_tokens": 4, "messages": [
            *TURNS,
            {"role": "assistant", "content": "", "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function",
                 "function": {"name": "weather", "arguments": "{}"}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN_WEBUI)
async def test_requests_of_open_webui_are_answered(http: httpx.AsyncClient, name: str) -> None:
    headers = {
        "authorization": "Bearer none", "X-OpenWebUI-User-Name": "me", "X-OpenWebUI-Chat-Id": "c1",
    }  # fmt: skip
    [model] = (await http.get("/v1/models", headers=headers)).json()["data"]
    body = {"model": model["id"], **OPEN_WEBUI[name]}
    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        assert answer.json()["choices"][0]["message"]["content"] == WHOLE.answer
        return
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in events[:-1])
    assert text if name == "after a call" else text == WHOLE.answer
    if "stream_options" in body:
        assert events[-1]["usage"]["total_tokens"] > 0
    unknown = answer.headers.get("x-diptych-ignored", "")
    assert ("repeat_penalty, num_ctx" in unknown) == (name == "settings of Ollama")


async def test_a_benchmark_gets_the_log_probabilities_of_what_it_sent(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    """As lm-evaluation-harness's local-completions asks: context and continuation as tokens."""
    told = await http.post("/tokenize", json={"prompt": "The capital of France is Paris."})
    ids: list[int] = told.json()["tokens"]
    asked = [ids, ids[:4]]
    answer = await client.completions.create(
        model="smollm2", prompt=asked, echo=True, max_tokens=1, logprobs=1, temperature=0,
        extra_body={"prompt_logprobs": 1},
    )  # fmt: skip
    for choice, sent in zip(answer.choices, asked, strict=True):
        logprobs, rows = choice.logprobs, (choice.model_extra or {})["prompt_logprobs"]
        assert logprobs is not None
        values, tops = logprobs.token_logprobs or [], logprobs.top_logprobs or []
        assert len(values) == len(tops) == len(sent) + 1
        of_prompt = [rows[at][str(token)]["logprob"] for at, token in enumerate(sent) if at]
        assert values[:-1] == [None, *of_prompt]
        assert all(max(tops[at].values()) >= values[at] for at in range(1, len(values)))
        for token, offset in zip(logprobs.tokens or [], logprobs.text_offset or [], strict=True):
            assert choice.text[offset:].startswith(token)


async def test_a_stream_of_an_echo_has_the_log_probabilities_of_a_whole_answer(
    client: openai.AsyncOpenAI,
) -> None:
    asked: Any = {
        "model": "smollm2", "prompt": ["The capital of France is", "One, two,"], "n": 2,
        "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 3,
    }  # fmt: skip
    whole = await client.completions.create(**asked)
    streamed = [{"text": "", "tokens": [], "token_logprobs": []} for _ in whole.choices]
    async for event in await client.completions.create(**asked, stream=True):
        for choice in event.choices:
            streamed[choice.index]["text"] += choice.text
            for name in ("tokens", "token_logprobs") if choice.logprobs else ():
                streamed[choice.index][name] += getattr(choice.logprobs, name)
    for choice, got in zip(whole.choices, streamed, strict=True):
        assert choice.logprobs is not None
        assert (got["text"], got["tokens"]) == (choice.text, choice.logprobs.tokens)
        values = choice.logprobs.token_logprobs or []
        assert got["token_logprobs"][0] is values[0] is None
        assert got["token_logprobs"][1:] == pytest.approx(values[1:], abs=1e-2)


async def test_openais_client_goes_on_with_a_call_in_a_stored_response(
    client: openai.AsyncOpenAI,
) -> None:
    tool: Any = {
        "type": "function",
        "name": "weather",
        "description": WEATHER["description"],
        "parameters": WEATHER["input_schema"],
        "strict": True,
    }
    first = await client.responses.create(
        model="smollm2",
        input="What is the weather in Paris?",
        tools=[tool],
        tool_choice={"type": "function", "name": "weather"},
        temperature=0,
        max_output_tokens=100,
        store=True,
    )
    [call] = first.output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert set(json.loads(call.arguments)) == {"city"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = await client.responses.create(
        model="smollm2",
        input=[result],
        previous_response_id=first.id,
        max_output_tokens=5,
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text


async def test_openais_client_gets_a_response_of_a_schema(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        model="smollm2",
        input="Will it rain?",
        text={"format": {"type": "json_schema", "name": "rain", "schema": RAIN}},
        temperature=0,
        max_output_tokens=60,
    )
    assert json.loads(response.output_text) in ({"rain": True}, {"rain": False})
