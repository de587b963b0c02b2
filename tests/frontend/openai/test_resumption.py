"""A stream that broke off goes on, and both parts together are the stream that did not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio

from diptych_frontend.app import build_app
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.quotas.books import Books
from diptych_frontend.quotas.limits import Limits
from diptych_frontend.quotas.quotas import Quotas
from diptych_frontend.text.input_processor import InputProcessor
from diptych_frontend.text.output_processor import OutputProcessor
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KeptAnswer,
    RouterConfig,
)
from diptych_router.requests.pool_client import PoolClient

ASKS = {"x-diptych-resumable": "1", "x-request-id": "asked"}
TEXT = "Grüße 😀 an die Welt, 東京から 👩‍👩‍👧! \u2003And so on."
CALLS = "".join(
    f'<tool_call>\n{{"name": "f", "arguments": {{"x": "{x}"}}}}\n</tool_call>\n' for x in "ß😀"
)
THOUGHT = f"<think>\nhm, 東京 😀\n</think>\n\n{TEXT}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    # what is asked: the model's answer, fields of the request
    "a text": (TEXT, {}),
    "a text that a stop string ends": (TEXT, {"stop": ["から", "Welt!"]}),
    "a text that is held back for stop strings": (TEXT, {"stop": ["And so forth"]}),
    "a text with its stop string": (
        TEXT,
        {"stop": ["から"], "include_stop_str_in_output": True, "min_tokens": 3},
    ),
    "reasoning": (THOUGHT, {"stop": ["so on"]}),
    "calls": (CALLS, {"tools": TOOLS, "tool_choice": "required"}),
    "usage in each event": (
        TEXT,
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
}


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
        if not self.output_processor.process([output]) and not is_last:
            asyncio.get_running_loop().call_soon(self._say, request_id, end)

    def _withdraw(self, request_ids: list[str], outcome: str = "abort") -> None:
        pass

    async def find_kept(self, name: str, tenant: str) -> list[KeptAnswer]:
        return self.found


@dataclass
class Read:
    """What a client has."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[int, Any]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ids: set[tuple[str, int]] = field(default_factory=set)
    usage: list[Any] = field(default_factory=list)


def as_read(events: Iterable[str]) -> Read:
    read = Read()
    for event in events:
        data = event.rpartition("data: ")[2]
        if data == "[DONE]":
            read.ends.append(data)
            continue
        chunk = json.loads(data)
        read.ids.add((chunk["id"], chunk["created"]))
        read.usage = chunk.get("usage") or read.usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            read.content += delta["content"]
            read.reasoning += delta.get("reasoning_content", "")
            read.calls += [
                (call["index"], call["function"]) for call in delta.get("tool_calls", ())
            ]
            read.ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return read


@pytest.fixture(scope="module")
def renderer(smollm2: str) -> TextRenderer:
    return TextRenderer(resolve_model(smollm2, weights=False))


async def events_of(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> list[str]:
    answer = await http.post("/v1/chat/completions", json=body, headers=ASKS | headers)
    assert answer.status_code == 200, answer.text
    return answer.text.removesuffix("\n\n").split("\n\n")


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


async def test_the_rest_is_billed_and_what_was_told_is_not(
    engine: Scripted, renderer: TextRenderer, tmp_path: Path, eventually: Any
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
        usage = as_read(whole).usage
        [last_id] = [id_of(x)[0] for x in whole if x[:3] == "id:" and id_of(x)[1] == num_told]
        for known in (num_told, num_told + 2, num_all):
            kept = KeptAnswer(engine.tokens[:known])
            kept.finish_reason = FinishReason.LENGTH if known == num_all else None
            engine.found = [kept]
            wanted = await used() + num_all - num_told
            limits["ann"] = Limits(token_budget=wanted)
            rest = as_read(await events_of(http, body, **key, **{"last-event-id": last_id}))
            assert rest.usage == usage, "the client is told of the whole answer"
            assert await used() == wanted


@pytest.mark.parametrize("asked", ASKED)
async def test_wherever_a_stream_breaks_off_its_parts_are_the_whole(
    engine: Scripted, renderer: TextRenderer, asked: str
) -> None:
    said, fields = ASKED[asked]
    engine.tokens = [*renderer.tokenize(said, add_special_tokens=False), 2]
    body = {
        **{"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 300},
        **{"stream": True, "stream_options": {"include_usage": True}},
        **fields,
    }
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        whole = await events_of(http, body)
        wanted = as_read(whole)
        assert "usage" in asked or len(whole) > 8, whole
        for count, event in enumerate(whole, 1):
            if not event.startswith("id: "):
                continue
            last_id, num_told = id_of(event)
            # The engines have no more than that, or some more, or all of it.
            num_all = len(engine.tokens)
            known = engine.steps.choice((num_told, min(num_told + 2, num_all), num_all))
            kept = KeptAnswer(engine.tokens[:known])
            if known == num_all:
                kept.finish_reason = FinishReason.STOP
            engine.found = [KeptAnswer(engine.tokens[:1]), kept, KeptAnswer([7] * 400)]
            rest = await events_of(http, body, **{"last-event-id": last_id})
            assert as_read([*whole[:count], *rest]) == wanted, (last_id, known)
