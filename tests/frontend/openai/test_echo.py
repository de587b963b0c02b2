"""Completions that begin with their prompt, and those without a token of the model's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_kit.echo_engine import EchoEngine

from diptych_frontend.openai.completions import CompletionWriter, echoed
from diptych_frontend.openai.responses import Envelope, Tally, encode
from diptych_protocol import CompletionOutput, Logprob, RequestOutput

PATH = "/v1/completions"


async def ask(http: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await http.post(PATH, json={"model": "echo", "prompt": "hi", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
async def test_an_answer_begins_with_its_prompt(http: httpx.AsyncClient, prompt: Any) -> None:
    told = await ask(http, prompt=prompt, echo=True, max_tokens=2)
    assert told["choices"][0]["text"] == "abcab"
    assert told["usage"]["completion_tokens"] == 2


async def test_so_does_each_of_several_answers_to_several_prompts(
    http: httpx.AsyncClient,
) -> None:
    told = await ask(http, prompt=["ab", "xyz"], n=2, echo=True, max_tokens=1)
    assert [each["text"] for each in told["choices"]] == ["aba", "abb", "xyzx", "xyzy"]


async def test_a_stream_begins_with_it_too(http: httpx.AsyncClient) -> None:
    body = {"model": "echo", "prompt": "abc", "echo": True, "max_tokens": 4, "stream": True, "n": 2}
    answer = await http.post(PATH, json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
    texts = ["", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abcabca", "abcbcab"]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_is_answered_where_none_is_wanted(
    http: httpx.AsyncClient, engine: EchoEngine, stream: bool
) -> None:
    asked = {"model": "echo", "prompt": "abc", "echo": True, "max_tokens": 0, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    answer = await http.post(PATH, json=asked)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
        choices = [choice for event in events for choice in event["choices"]]
        usage = events[-1]["usage"]
    else:
        choices, usage = answer.json()["choices"], answer.json()["usage"]
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert choices[-1]["finish_reason"] == "length"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
    assert engine.seen[0][1].max_tokens == 1
    assert (await ask(http, max_tokens=0))["choices"][0]["text"] == ""


async def test_the_prompts_log_probabilities_are_asked_for(
    http: httpx.AsyncClient, engine: EchoEngine
) -> None:
    await ask(http, echo=True, logprobs=3)
    await ask(http, echo=True, logprobs=3, prompt_logprobs=5)
    await ask(http, echo=True)
    assert [seen[1].prompt_logprobs for seen in engine.seen] == [3, 5, None]


def row(*entries: tuple[int, float, bytes]) -> dict[int, Logprob]:
    return {
        token: Logprob(value, rank, data.decode(errors="replace"), data)
        for rank, (token, value, data) in enumerate(entries, 1)
    }


def test_an_echos_tokens_have_their_places_in_the_text() -> None:
    unicorn = "\U0001f984".encode()
    rows = [
        None,
        row((7, -1.0, unicorn[:2]), (9, -0.5, b"x")),
        row((8, -2.0, unicorn[2:])),
        row((6, -3.0, b"!")),
    ]
    told = echoed("ab\U0001f984!", [5, 7, 8, 6], rows)
    assert told.tokens[0] == "ab"
    assert told.token_logprobs == [None, -1.0, -2.0, -3.0]
    assert told.text_offset == [0, 2, 3, 3]
    assert told.top_logprobs[0] is None
    assert list(json.loads(encode(told.top_logprobs[1])).values()) == [-0.5, -1.0]
    # A model that begins every prompt with a token of its own.
    begun = echoed("!", [1, 6], [None, row((6, -3.0, b"!"))])
    assert (begun.tokens, begun.text_offset) == (["", "!"], [0, 0])


class CountedRows(list[dict[int, Logprob] | None]):
    """Log-probabilities of a prompt, and how often somebody went through all of them."""

    times_read = 0

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        self.times_read += 1
        return super().__iter__()


def test_a_prompts_log_probabilities_are_read_once_for_all_choices() -> None:
    rows = CountedRows([None, row((98, -1.0, b"b"))])
    choices = [CompletionOutput(index, "!", [33], None, None, "length") for index in range(3)]
    output = RequestOutput("r", "ab", [97, 98], choices, True, prompt_logprobs=rows)
    writer = CompletionWriter(Envelope("c", 0, "m", len(choices), None), ["ab"])
    told = json.loads(writer.answer([[output]], Tally(2)))["choices"]
    assert rows.times_read == 2, "for logprobs, and for prompt_logprobs"
    for choice in told:
        assert choice["text"] == "ab!"
        assert choice["logprobs"]["tokens"] == ["a", "b"]
        assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}]
        assert choice["prompt_logprobs"][1]["98"]["logprob"] == -1.0


def test_each_choice_of_a_stream_begins_with_its_prompts_log_probabilities() -> None:
    """Only the first choice's engine request has them, and another choice may be said before."""
    writer = CompletionWriter(Envelope("c", 0, "m", 2, None), ["ab"])
    rows = CountedRows([None, row((98, -1.0, b"b"))])

    def said(index: int, text: str, **of_prompt: Any) -> list[dict[str, Any]]:
        of_token = [row((ord(text), -2.0, text.encode()))]
        choice = CompletionOutput(index, text, [ord(text)], None, of_token, None, text_ends=[at])
        output = RequestOutput("r", "ab", [97, 98], [choice], False, **of_prompt)
        lines = writer.events(0, output, Tally(2)).splitlines()
        return [json.loads(line[6:])["choices"][0] for line in lines if line]

    at = 1
    assert said(1, "!") == []
    second, first = said(0, "?", prompt_logprobs=rows)
    at = 2
    [later] = said(1, ".")
    assert rows.times_read == 1
    assert (first["index"], first["text"], second["index"], second["text"]) == (0, "ab?", 1, "ab!")
    assert first["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert second["logprobs"]["tokens"] == ["a", "b", "!"]
    assert second["logprobs"]["text_offset"] == [0, 1, 2]
    assert (later["text"], later["logprobs"]["text_offset"]) == (".", [3])


@pytest.mark.parametrize(
    ("change", "field"),
    [({"logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")],
)
async def test_log_probabilities_of_a_prompt_are_not_multiplied_without_bound(
    http: httpx.AsyncClient, engine: EchoEngine, change: dict[str, Any], field: str
) -> None:
    asked = {"model": "echo", "prompt": ["x" * 1000] * 2, "echo": True, "max_tokens": 1, **change}
    refused = await http.post(PATH, json=asked | {"n": 50})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert not engine.seen
    assert (await http.post(PATH, json=asked | {"n": 49})).status_code == 200
