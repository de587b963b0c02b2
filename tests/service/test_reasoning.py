"""Chats with a model that reasons, through a router, a prefill engine and a decode engine.

The model was not trained to reason. `forced` are fields of the API that leave it no other way than
`<think> wonder</think>` once it may write that.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from service_kit import Pair

from diptych_frontend.app import build_app
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_protocol import (
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
WAYS = {" wonder": 100, "</": 80, "think": 60, ">": 40, "<": 20}
"""Tokens and how much more likely they are made; each is kept from coming where it does not fit."""
MISFITS = [" wonder wonder", "</</", "</ wonder", "think</", "thinkthink", "think wonder"]
FORM = {"structured_outputs": {"choice": ["yes", "no"]}}
TOOL = {"type": "function", "function": {"name": "look_out"}}


@pytest.fixture(scope="module")
def pair_options() -> dict[str, Any]:
    return {"reasoning_parser": "think"}


@pytest.fixture(scope="module")
def router_options() -> dict[str, Any]:
    return {"reasoning_parser": "think"}


@pytest.fixture(scope="module")
def forced(smollm2: str) -> dict[str, Any]:
    tokenizer = load_tokenizer(resolve_model(smollm2))
    assert tokenizer is not None
    biases = {str(tokenizer.encode(text)[0]): bias for text, bias in WAYS.items()}
    return {"logit_bias": biases, "bad_words": MISFITS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(pair: Pair) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(pair.pools))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def ask(http: httpx.AsyncClient, **fields: Any) -> Any:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Will it rain?"}],
        "temperature": 0.0,
        "max_tokens": 60,
        **fields,
    }
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer if body.get("stream") else answer.json()


async def test_contract_C05_reasoning_crosses_the_hinge(
    pair: Pair, http: httpx.AsyncClient, forced: dict[str, Any]
) -> None:
    """The prefill engine makes the first token of the marker, the decode engine what follows."""
    before = await pair.decode.refresh_stats()
    told = await ask(http, **FORM, **forced)
    after = await pair.decode.refresh_stats()
    [choice] = told["choices"]
    assert choice["message"]["reasoning_content"] == "wonder"
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    received = after.remote_kv_tokens - before.remote_kv_tokens
    assert received == told["usage"]["prompt_tokens"]


async def test_contract_C05_a_stream_says_the_same(
    http: httpx.AsyncClient, forced: dict[str, Any]
) -> None:
    whole = (await ask(http, **FORM, **forced))["choices"][0]["message"]
    streamed = await ask(http, stream=True, **FORM, **forced)
    lines = [line for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == whole["reasoning_content"]
    assert "".join(delta["content"] for delta in deltas) == whole["content"]


async def test_contract_C05_a_forced_call_comes_after_the_reasoning(
    http: httpx.AsyncClient, forced: dict[str, Any]
) -> None:
    told = await ask(
        http, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **forced
    )
    [choice] = told["choices"]
    assert choice["message"]["reasoning_content"] == "wonder"
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look_out"]


async def test_contract_C05_a_chat_that_may_not_reason_has_its_form_at_once(
    http: httpx.AsyncClient, forced: dict[str, Any]
) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    told = await ask(http, **off, **FORM, **forced)
    message = told["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] in ("yes", "no")
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"reasoning_parser_kwargs": {"other": 1}}, "reasoning_parser_kwargs"),
        ({"reasoning_ended": 1}, "reasoning_ended"),
    ],
)
async def test_contract_B03_wrong_options_of_reasoning_leave_nothing_behind(
    pair: Pair, options: dict[str, Any], field: str
) -> None:
    for client in (pair.pools, pair.decode):
        with pytest.raises(InvalidRequestError) as refusal:
            await anext(client.generate("Will it rain?", SamplingParams(), "r", **options))
        assert refusal.value.param == field
        assert len(client.output_processor.answers) == 0


async def test_contract_B03_leaving_in_the_middle_of_reasoning_aborts(
    pair: Pair, eventually: Any
) -> None:
    """No token ends the reasoning here: it would go on to the model's limit."""
    params = SamplingParams(
        max_tokens=None,
        structured_outputs=StructuredOutputsParams(choice=["yes"]),
        output_kind=RequestOutputKind.DELTA,
    )
    outputs = pair.pools.generate("Will it rain?", params, "r", reasoning_ended=False)
    seen = 0
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            assert not output.finished
            seen += len(output.outputs[0].token_ids)
            if seen > 5:
                break
    await eventually(pair.all_blocks_free)


async def test_contract_C05_an_engine_alone_says_what_the_pools_say(
    pair: Pair, http: httpx.AsyncClient, forced: dict[str, Any]
) -> None:
    transport = httpx.ASGITransport(build_app(pair.decode))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as alone:
        messages = [(await ask(one, **FORM, **forced))["choices"] for one in (alone, http)]
    assert messages[0] == messages[1]
