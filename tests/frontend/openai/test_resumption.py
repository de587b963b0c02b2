"""A stream that broke off goes on, and both parts together are the stream that did not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio
from streams_read import READ, as_read

from diptych_frontend.app import build_app
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.resumption import EventIds, asked_for, choose_kept
from diptych_frontend.quotas.books import Books
from diptych_frontend.quotas.ledger import Limits
from diptych_frontend.quotas.quotas import Quotas
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    KeptAnswer,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    RouterConfig,
    SamplingParams,
    TokensPrompt,
)
from diptych_router.requests.pool_client import PoolClient

ASKS = {"x-diptych-resumable": "1", "x-request-id": "asked"}
TEXT = "Grüße 😀 an die Welt, 東京から 👩‍👩‍👧! \u2003And so on."
CALLS = "".join(
    f'<tool_call>\n{{"name": "f", "arguments": {{"x": "{x}"}}}}\n</tool_call>\n' for x in "ß😀"
)
THOUGHT = f"<think>\nhm, 東京 😀\n</think>\n\n{TEXT}"
AROUND = f"Ich sehe {CALLS}\nund 東京: {CALLS} Ende"
"""Each text between calls is a part of its own in the APIs that have parts."""
SAID: dict[str, tuple[str, list[str]]] = {
    # what the model answers, and where it is stopped
    "a text": (TEXT, []),
    "a text that a stop string ends": (TEXT, ["から", "Welt!"]),
    "a text that is held back for stop strings": (TEXT, ["And so forth"]),
    "reasoning": (THOUGHT, ["so on"]),
    "calls": (CALLS, []),
    "calls between texts": (AROUND, []),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # of chats alone: the model's answer, fields of the request
    "a text with its stop string": (
        TEXT,
        {"stop": ["から"], "include_stop_str_in_output": True, "min_tokens": 3},
    ),
    "usage in each event": (
        TEXT,
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
}
MESSAGES = [{"role": "user", "content": "?"}]
WITH_USAGE = {"max_tokens": 300, "stream_options": {"include_usage": True}}
FUNCTION = {"name": "f", "parameters": {}}
ASKED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    # path: the request, its field for stop strings, and its fields for calls
    "/v1/chat/completions": (
        {"messages": MESSAGES, **WITH_USAGE},
        "stop",
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    ),
    "/v1/completions": ({"prompt": "What do you see over there?", **WITH_USAGE}, "stop", {}),
    "/v1/responses": (
        {"input": "?", "max_output_tokens": 300},
        "stop",
        {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 300},
        "stop_sequences",
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
    ),
}
CASES = [
    *((path, name) for path in ASKED for name in SAID if path != "/v1/completions"),
    *(("/v1/chat/completions", name) for name in OTHERS),
    *(("/v1/completions", name) for name in SAID if "text" in name and "calls" not in name),
]


def asked(path: str, name: str) -> tuple[str, dict[str, Any]]:
    """What the model answers, and the request."""
    body, stop_field, for_calls = ASKED[path]
    body = {"model": "m", "stream": True, **body}
    if name in OTHERS:
        said, more = OTHERS[name]
        return said, body | more
    said, stop = SAID[name]
    return said, body | {stop_field: stop} | (for_calls if CALLS in said else {})


class Scripted(PoolClient):
    """A router whose engines always say the same tokens, some at a time."""

    tokens: list[int]
    steps: Random
    found: list[KeptAnswer]

    def _submit(self, request: EngineCoreRequest, leader: str | None = None) -> None:
        num_kept = len(request.generated_token_ids or ())
        if any(0 < kept.num_told < num_kept == len(kept.token_ids) for kept in self.found):
            # On a busy loop an engine answers before what the loop is told to do soon.
            self._say(request.request_id, num_kept)
        else:
            asyncio.get_running_loop().call_soon(self._say, request.request_id, num_kept)

    def _say(self, request_id: str, begin: int) -> None:
        end = min(begin + self.steps.choice((1, 1, 1, 3)), len(self.tokens))
        output = EngineCoreOutput(request_id, self.tokens[begin:end])
        is_last = end == len(self.tokens)
        output.finish_reason = FinishReason.STOP if is_last else None
        output.num_cached_tokens = 0 if begin else 3
        if not self.output_processor.process([output]) and not is_last:
            asyncio.get_running_loop().call_soon(self._say, request_id, end)

    def _withdraw(self, request_ids: list[str], outcome: str = "abort") -> None:
        pass

    async def find_kept(self, name: str, tenant: str) -> list[KeptAnswer]:
        return self.found


@pytest.fixture(scope="module")
def renderer(smollm2: str) -> TextRenderer:
    return TextRenderer(resolve_model(smollm2, weights=False))


async def events_of(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    **headers: str,
) -> list[str]:
    answer = await http.post(path, json=body, headers=ASKS | headers)
    assert answer.status_code == 200, answer.text
    return answer.text.split("\n\n")[:-1]


class OneByOne(Random):
    def choice(self, choices: Any) -> Any:
        return choices[0]


@pytest_asyncio.fixture
async def engine(smollm2: str, renderer: TextRenderer) -> AsyncIterator[Scripted]:
    config = RouterConfig(model=smollm2, served_name="m", reasoning_parser="think")
    inputs = InputProcessor(renderer, max_model_len=512, vocab_size=49152, reasoning_parser="think")
    outputs = OutputProcessor(renderer.tokenizer, reasoning_parser="think")
    made = Scripted(config, inputs, outputs, targets={"prefill": [], "decode": []}, read_keys=None)
    made.steps, made.found = Random(7), []
    yield made
    made.shutdown()


def id_of(event: str) -> tuple[str, int]:
    """The id, and how many tokens its client has then."""
    last_id = event.partition("\n")[0].removeprefix("id: ")
    return last_id, int(last_id.split(".")[1])


@pytest.mark.parametrize("is_unpaid", [False, True])
async def test_the_rest_is_billed_and_what_was_told_only_if_its_router_was_lost(
    engine: Scripted, renderer: TextRenderer, tmp_path: Path, eventually: Any, is_unpaid: bool
) -> None:
    """The limit has room for the whole answer and for the rest of it, to the token."""
    engine.tokens = renderer.tokenize(TEXT, add_special_tokens=False)
    num_told, num_all = 5, len(engine.tokens)
    engine.steps = OneByOne()
    body = {
        **{"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": num_all},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    (tmp_path / "ann").write_text("sesame")
    limits: dict[str, Limits] = {"ann": Limits(token_budget=1000)}
    books = Books(None)
    quotas = Quotas(lambda: limits, books)

    async def used() -> int:
        """What the key of ann has used when all is entered."""
        await eventually(lambda: quotas._posting is None and not quotas._ended)
        return books.ledger.counts["ann"].ever

    app = build_app(engine, api_keys=ApiKeys(tmp_path), quotas=quotas)
    key = {"authorization": "Bearer sesame"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as http:
        whole = await events_of(http, body, **key)
        usage, all_tokens = as_read(whole).usage, await used()
        [last_id] = [id_of(x)[0] for x in whole if x[:3] == "id:" and id_of(x)[1] == num_told]
        for known in (num_told, num_told + 2, num_all):
            kept = KeptAnswer(engine.tokens[:known], is_unpaid=is_unpaid)
            kept.finish_reason = FinishReason.LENGTH if known == num_all else None
            engine.found = [KeptAnswer(engine.tokens[:known]), kept][: 1 + is_unpaid]
            engine.found[0].finish_reason = kept.finish_reason
            wanted = await used() + (all_tokens if is_unpaid else num_all - num_told)
            limits["ann"] = Limits(token_budget=wanted)
            rest = as_read(await events_of(http, body, **key, **{"last-event-id": last_id}))
            assert rest.usage == usage, "the client is told of the whole answer"
            assert await used() == wanted


def test_no_answer_goes_on_for_another_prompt_adapter_or_image() -> None:
    def seen(name: str) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(0, 1))

    plain, params = TokensPrompt(prompt_token_ids=[1, 2, 3]), SamplingParams()
    adapters = [None, LoRARequest("one", 1, "/one"), LoRARequest("other", 1, "/one")]
    asked = [asked_for(plain, adapter, params) for adapter in adapters]
    asked.append(asked_for(TokensPrompt(prompt_token_ids=[1, 2, 4]), None, params))
    asked.append(asked_for(plain, None, SamplingParams(seed=1)))
    for name in ("a", "b"):
        prompt = TokensPrompt(prompt_token_ids=[1, 2, 3], mm_features=[seen(name)])
        asked.append(asked_for(prompt, None, params))
    ids = []
    for each in asked:
        answer = EventIds("f" * 32, 7, "r", each)
        answer.saw([5])
        ids.append(id_of(answer.marked(b"data: 1\n\n").decode())[0])
    for one, its_id in zip(asked, ids, strict=True):
        for other in asked:
            if one == other:
                choose_kept([KeptAnswer([5, 6])], its_id, other)
                continue
            with pytest.raises(InvalidRequestError, match="another request") as refused:
                choose_kept([KeptAnswer([5, 6])], its_id, other)
            assert refused.value.status == 409


@pytest.mark.parametrize("path", ASKED)
async def test_an_id_that_nothing_goes_on_from_is_refused_as_the_api_refuses(
    engine: Scripted, renderer: TextRenderer, path: str
) -> None:
    said, body = asked(path, "a text")
    engine.tokens = renderer.tokenize(said, add_special_tokens=False)
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        last_id, num_told = id_of((await events_of(http, body, path))[5])
        for given, kept, status, code, kind in (
            (last_id, [], 404, "answer_not_kept", "not_found_error"),
            (last_id, engine.tokens[: num_told - 1], 404, "answer_not_kept", "not_found_error"),
            (last_id, [7] * 400, 409, "another_answer", "invalid_request_error"),
            ("42", engine.tokens, 400, None, "invalid_request_error"),
        ):
            engine.found = [KeptAnswer(kept)] if kept else []
            headers = ASKS | {"last-event-id": given}
            answer = await http.post(path, json=body, headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == status, error
            if path == "/v1/messages":
                assert (answer.json()["type"], error["type"]) == ("error", kind)
            else:
                assert (error["param"], error["code"]) == ("Last-Event-ID", code)


async def test_no_client_can_have_had_more_of_a_prompt_in_a_cache_than_the_prompt(
    engine: Scripted, renderer: TextRenderer
) -> None:
    path = "/v1/messages"
    said, body = asked(path, "a text")
    engine.tokens = [*renderer.tokenize(said, add_special_tokens=False), 2]
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        parts = id_of((await events_of(http, body, path))[5])[0].split(".")
        parts[6] = "9" * 9
        engine.found = [KeptAnswer(engine.tokens, FinishReason.STOP)]
        rest = await events_of(http, body, path, **{"last-event-id": ".".join(parts)})
    usage = READ[path](rest)[-2][0]["usage"]
    assert usage["input_tokens"] == 0
    assert 0 < usage["cache_read_input_tokens"] < 100


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("path", "name"), CASES)
async def test_wherever_a_stream_breaks_off_its_parts_are_the_whole(
    engine: Scripted, renderer: TextRenderer, path: str, name: str
) -> None:
    said, body = asked(path, name)
    engine.tokens = [*renderer.tokenize(said, add_special_tokens=False), 2]
    num_all, read = len(engine.tokens), READ[path]
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        whole = await events_of(http, body, path)
        wanted = read(whole)
        assert "usage" in name or len(whole) > 8, whole
        for count, event in enumerate(whole, 1):
            last_id, num_told = id_of(event)
            # The engines have no more than that, or some more, or all of it.
            known = engine.steps.choice((num_told, min(num_told + 2, num_all), num_all))
            kept = KeptAnswer(engine.tokens[:known])
            if known == num_all:
                kept.finish_reason = FinishReason.STOP
            engine.found = [KeptAnswer(engine.tokens[:1]), kept, KeptAnswer([7] * 400)]
            rest = await events_of(http, body, path, **{"last-event-id": last_id})
            assert read([*whole[:count], *rest]) == wanted, (last_id, known)
