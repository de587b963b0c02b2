"""`generate` on a real engine process with the real model, and what HTTP clients get of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import pytest_asyncio

from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    EngineConfig,
    EngineOverloadedError,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StreamingInput,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The capital of France is"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
RANDOM = {"temperature": 1.0, "top_p": 0.9}
"""Without the tail, where the last bit of a sum may decide between tokens."""
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CHAT: Any = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Weather in Rome?"}],
    "max_tokens": 200,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm2: str) -> AsyncIterator[AsyncLLM]:
    config = EngineConfig(
        model=smollm2,
        served_name="smollm2",
        num_blocks=256,
        num_threads=1,
        max_model_len=512,
    )
    engine = await AsyncLLM.start(config)
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(engine: AsyncLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, straight into the app."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(build_app(engine)))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=http,  # type: ignore[arg-type]
    ) as client:
        yield client


async def generate(engine: AsyncLLM, prompt: Any, **params: Any) -> list[RequestOutput]:
    fields = {"temperature": 0.0, "output_kind": RequestOutputKind.FINAL_ONLY, **params}
    return [o async for o in engine.generate(prompt, SamplingParams(**fields), "request")]


async def text(engine: AsyncLLM, prompt: Any, **params: Any) -> str:
    [output] = await generate(engine, prompt, **params)
    return output.outputs[0].text


async def all_blocks_free(engine: AsyncLLM) -> bool:
    stats = await engine.refresh_stats()
    return stats.num_running == 0 and stats.blocks_free == stats.blocks_total


# --- generate -------------------------------------------------------------------------------------


async def test_contract_C05_every_kind_of_prompt_gives_the_same(engine: AsyncLLM) -> None:
    rendered = engine.renderer.render_prompt(PROMPT)
    token_ids = rendered["prompt_token_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
    made_elsewhere = engine.input_processor.process("x", PROMPT, params)
    made_elsewhere.external_req_id = None
    answers = [
        await text(engine, prompt, max_tokens=3)
        for prompt in (PROMPT, token_ids, {"prompt": PROMPT}, rendered, made_elsewhere)
    ]
    assert len(set(answers)) == 1
    assert answers[0]


async def test_contract_C27_options_of_the_tokenizer_are_for_every_piece(
    engine: AsyncLLM,
) -> None:
    async def pieces() -> AsyncGenerator[StreamingInput, None]:
        for piece in ("one two three", " four five six"):
            yield StreamingInput(piece)

    wanted = SamplingParams(temperature=0.0, max_tokens=1)
    options = {"truncation": True, "max_length": 2}
    outputs = engine.generate(pieces(), wanted, "pieces", tokenization_kwargs=options)
    assert {len(o.prompt_token_ids or ()) async for o in outputs} == {2, 4}


async def test_contract_C05_leaving_early_aborts_in_the_core(
    engine: AsyncLLM, eventually: Any
) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async with contextlib.aclosing(engine.generate(PROMPT, params, "leaver")) as outputs:
        first = await anext(outputs)
        assert not first.finished
    await eventually(lambda: all_blocks_free(engine))


async def test_contract_C05_it_yields_until_one_is_finished(engine: AsyncLLM) -> None:
    outputs = await generate(
        engine, PROMPT, max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 5


# --- several answers ------------------------------------------------------------------------------


async def test_contract_B02_children_have_seeds_of_their_own(engine: AsyncLLM) -> None:
    """Answer i of a seeded request is the answer to seed + i; all come together, in order."""
    options: dict[str, Any] = {**RANDOM, "max_tokens": 5, "ignore_eos": True}
    [together] = await generate(engine, PROMPT, n=4, seed=40, **options)
    assert [answer.index for answer in together.outputs] == [0, 1, 2, 3]
    texts = [answer.text for answer in together.outputs]
    assert len(set(texts)) > 1
    assert texts == [await text(engine, PROMPT, seed=40 + i, **options) for i in range(4)]


async def test_contract_B02_streamed_children_carry_their_index(engine: AsyncLLM) -> None:
    options: dict[str, Any] = {**RANDOM, "max_tokens": 6, "n": 3, "seed": 1}
    [whole] = await generate(engine, PROMPT, **options)
    texts = ["", "", ""]
    deltas = await generate(engine, PROMPT, output_kind=RequestOutputKind.DELTA, **options)
    for output in deltas:
        for answer in output.outputs:
            texts[answer.index] += answer.text
    assert texts == [answer.text for answer in whole.outputs]


async def test_contract_B02_an_abort_of_the_parent_frees_all(
    engine: AsyncLLM, eventually: Any
) -> None:
    running = asyncio.create_task(generate(engine, PROMPT, n=4, max_tokens=400, ignore_eos=True))
    await eventually(lambda: len(engine.output_processor.answers) == 4)
    await engine.abort("request")
    [output] = await running
    assert {answer.finish_reason for answer in output.outputs} == {"abort"}
    await eventually(lambda: all_blocks_free(engine))


async def test_contract_B02_a_child_that_cannot_be_sent_takes_the_others_along(
    engine: AsyncLLM, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine._submit
    sent: list[str] = []

    def fail_at_the_third(request: Any, leader: str | None = None) -> None:
        if len(sent) == 2:
            raise EngineOverloadedError("no room for the third")
        sent.append(request.request_id)
        submit(request, leader)

    monkeypatch.setattr(engine, "_submit", fail_at_the_third)
    with pytest.raises(EngineOverloadedError, match="third"):
        await generate(engine, PROMPT, n=4, max_tokens=400, ignore_eos=True)
    assert len(sent) == 2
    assert len(engine.output_processor.answers) == 0
    await eventually(lambda: all_blocks_free(engine))


# --- stop strings ---------------------------------------------------------------------------------


async def test_contract_B05_a_stop_string_across_tokens_ends_the_text(
    engine: AsyncLLM, eventually: Any
) -> None:
    """It begins and ends inside tokens; the surplus goes, and the core is told."""
    whole = await text(engine, PROMPT, max_tokens=16)
    for start in (3, 17):
        stop = whole[start : start + 5]
        at = whole.find(stop)
        [output] = await generate(engine, PROMPT, max_tokens=400, stop=[stop])
        [answer] = output.outputs
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole[:at], "stop", stop)
        included = await text(
            engine, PROMPT, max_tokens=400, stop=[stop], include_stop_str_in_output=True
        )
        assert included == whole[:at] + stop
    await eventually(lambda: all_blocks_free(engine))


async def test_contract_B05_min_tokens_lets_an_early_stop_string_pass(engine: AsyncLLM) -> None:
    whole = await text(engine, PROMPT, max_tokens=4)
    stop = whole[1:3]
    [output] = await generate(engine, PROMPT, max_tokens=12, stop=[stop], min_tokens=10)
    assert output.outputs[0].text.startswith(whole[:5])
    assert len(output.outputs[0].token_ids) >= 10


# --- cache_salt -----------------------------------------------------------------------------------


async def test_contract_B10_a_prefix_is_shared_within_a_salt_only(engine: AsyncLLM) -> None:
    prompt = list(range(100, 148))
    cached = []
    for salt in ("red", "red", "blue", None, "blue"):
        salted = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        [output] = await generate(engine, salted, max_tokens=1)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 32, 0, 0, 32]


# --- prompt logprobs ------------------------------------------------------------------------------


async def test_contract_B06_a_client_gets_them_for_every_token_but_the_first(
    engine: AsyncLLM, client: openai.AsyncOpenAI
) -> None:
    extra = {"prompt_logprobs": 2}
    answer = await client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=2, extra_body=extra
    )
    [choice] = answer.choices
    rows: Any = choice.model_extra and choice.model_extra["prompt_logprobs"]
    token_ids = engine.renderer.render_prompt(PROMPT)["prompt_token_ids"]
    assert rows[0] is None
    for token, row in zip(token_ids[1:], rows[1:], strict=True):
        entry = row[str(token)]
        assert entry["decoded_token"] == engine.renderer.decode([token])
        assert entry["logprob"] <= 0
        assert entry["rank"] >= 1
        assert len(row) in (2, 3)
    chat: Any = await client.chat.completions.create(
        **{**CHAT, "max_tokens": 1, "extra_body": extra}
    )
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


# --- forms of answers -----------------------------------------------------------------------------


async def test_contract_C05_response_format_gives_what_fits_the_schema(
    client: openai.AsyncOpenAI,
) -> None:
    schema: openai.types.shared_params.ResponseFormatJSONSchema = {
        "type": "json_schema",
        "json_schema": {"name": "w", "schema": WEATHER},
    }
    whole = await client.chat.completions.create(**CHAT, temperature=0, response_format=schema)
    content = whole.choices[0].message.content or ""
    jsonschema.validate(json.loads(content), WEATHER)
    assert whole.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(
        **CHAT, temperature=0, response_format=schema, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == content


async def test_contract_C05_a_stop_string_ends_a_form_early(engine: AsyncLLM) -> None:
    form = StructuredOutputsParams(regex="[a-z]{3}:[0-9]{3}")
    whole = await text(engine, PROMPT, structured_outputs=form, max_tokens=40)
    assert re.fullmatch("[a-z]{3}:[0-9]{3}", whole)
    cut = await text(engine, PROMPT, structured_outputs=form, max_tokens=40, stop=[":"])
    assert cut == whole[:3]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 1000},
        {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1000},
        {"type": "array", "items": {"additionalProperties": True}, "minItems": 1000},
    ],
    ids=["string", "list", "maps"],
)
async def test_contract_C05_max_tokens_bounds_what_a_schema_leaves_open(
    engine: AsyncLLM, schema: dict[str, Any]
) -> None:
    form = StructuredOutputsParams(json=schema)
    [output] = await generate(engine, PROMPT, structured_outputs=form, max_tokens=12)
    [answer] = output.outputs
    assert (len(answer.token_ids), answer.finish_reason) == (12, "length")


async def test_contract_C05_structured_outputs_come_over_http(client: openai.AsyncOpenAI) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = await client.completions.create(
        model="smollm2", prompt=PROMPT, n=3, seed=1, max_tokens=8, extra_body=body
    )
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}


async def test_contract_C05_a_bad_schema_is_the_callers_error(
    engine: AsyncLLM, client: openai.AsyncOpenAI
) -> None:
    schema: openai.types.shared_params.ResponseFormatJSONSchema = {
        "type": "json_schema",
        "json_schema": {"name": "w", "schema": {"type": "odd"}},
    }
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(**CHAT, response_format=schema, stream=stream)
        assert refusal.value.param == "response_format"
    form = StructuredOutputsParams(json={"type": "odd"})
    with pytest.raises(InvalidRequestError, match="odd"):
        await generate(engine, PROMPT, structured_outputs=form)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ("required", {"weather", "now"}),
    ],
    ids=["named", "required"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_contract_C05_a_forced_call_fits_its_schema(
    client: openai.AsyncOpenAI, choice: Any, names: set[str], stream: bool
) -> None:
    body = {**CHAT, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    body |= {"parallel_tool_calls": False}
    if stream:
        chunks = [c async for c in await client.chat.completions.create(**body, stream=True)]
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = (await client.chat.completions.create(**body)).choices[0]
        assert answer.message.content is None
        calls, reason = answer.message.tool_calls or [], answer.finish_reason
    [call] = calls
    assert reason == "tool_calls"
    assert call.function.name in names
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    else:
        assert json.loads(call.function.arguments) == {}


async def test_contract_C05_bad_words_and_biases_come_over_http(
    engine: AsyncLLM, client: openai.AsyncOpenAI
) -> None:
    whole = await text(engine, PROMPT, max_tokens=8)
    word = whole.split()[0].strip(".,")
    answer = await client.completions.create(
        model="smollm2",
        prompt=PROMPT,
        temperature=0,
        max_tokens=8,
        extra_body={"bad_words": [word]},
    )
    assert word not in answer.choices[0].text
    [token] = engine.renderer.render_prompt(" blue")["prompt_token_ids"]
    biased = await client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=3, logit_bias={str(token): 100}
    )
    assert biased.choices[0].text == " blue blue blue"
