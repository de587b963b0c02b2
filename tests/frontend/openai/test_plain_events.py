"""Events of plain text are written from a pattern; they say what every other event says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.openai.api_types import StreamOptions
from diptych_frontend.openai.chat import AnswerParts, ChatWriter
from diptych_frontend.openai.completions import CompletionWriter
from diptych_frontend.openai.responses import Envelope, Tally
from diptych_protocol import CompletionOutput, Logprob, RequestOutput

NOTHING_ELSE = AnswerParts(None, None)

TEXTS = st.text(max_size=8) | st.sampled_from(['"text":""', '"content":""', "\\", "\n\n", "\x00"])
NAMES = st.sampled_from(["m", "text", '"text":""', '","content":"'])
USAGE = [
    None,
    StreamOptions(include_usage=True),
    StreamOptions(include_usage=True, continuous_usage_stats=True),
]


def outputs(text: str, index: int = 0) -> RequestOutput:
    return RequestOutput("r", None, [1], [CompletionOutput(index, text, [7])], finished=False)


def read(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    found: dict[str, Any] = msgspec.json.decode(event[6:-2])
    return found


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), TEXTS), max_size=6), NAMES,
       st.sampled_from(USAGE))  # fmt: skip
def test_completions(
    pieces: list[tuple[int, int, str]], model: str, usage: StreamOptions | None
) -> None:
    writer, tally = CompletionWriter(Envelope("cmpl-1", 5, model, 2, usage)), Tally(3)
    for prompt_index, index, text in pieces:
        output = outputs(text, index)
        tally.add(prompt_index, output)
        event = read(writer.events(prompt_index, output, tally))
        assert output.outputs[0].text == text, "the output is as it was"
        expected = {
            "id": "cmpl-1", "object": "text_completion", "created": 5, "model": model,
            "choices": [{
                "index": 2 * prompt_index + index, "text": text, "logprobs": None,
                "finish_reason": None, "stop_reason": None,
            }],
        }  # fmt: skip
        if usage is not None:
            told = msgspec.to_builtins(tally.usage()) if usage.continuous_usage_stats else None
            expected["usage"] = told
        assert event == expected
        assert list(event) == list(expected)


@given(st.lists(st.tuples(st.integers(0, 1), TEXTS), max_size=6), NAMES, st.sampled_from(USAGE))
def test_chats(pieces: list[tuple[int, str]], model: str, usage: StreamOptions | None) -> None:
    writer, tally = (
        ChatWriter(Envelope("chatcmpl-1", 5, model, 2, usage), 0, NOTHING_ELSE),
        Tally(3),
    )
    begun: set[int] = set()
    for index, text in pieces:
        output = outputs(text, index)
        tally.add(0, output)
        event = read(writer.events(0, output, tally))
        role = {} if index in begun else {"role": "assistant"}
        begun.add(index)
        expected = {
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": model,
            "choices": [{
                "index": index, "delta": {"content": text, **role}, "logprobs": None,
                "finish_reason": None, "stop_reason": None,
            }],
        }  # fmt: skip
        if usage is not None:
            told = msgspec.to_builtins(tally.usage()) if usage.continuous_usage_stats else None
            expected["usage"] = told
        assert event == expected


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"finish_reason": "length"}, "finish_reason", "length"),
        ({"finish_reason": "stop", "stop_reason": "x"}, "stop_reason", "x"),
    ],
)
def test_what_has_more_to_tell_tells_it(changes: dict[str, str], field: str, value: str) -> None:
    completions = CompletionWriter(Envelope("1", 5, "m", 1, None))
    chats = ChatWriter(Envelope("1", 5, "m", 1, None), 0, NOTHING_ELSE)
    for writer in (completions, chats):
        for _ in range(2):
            writer.events(0, outputs("a"), Tally(3))
        last = outputs("b")
        for name, to in changes.items():
            setattr(last.outputs[0], name, to)
        [choice] = read(writer.events(0, last, Tally(3)))["choices"]
        assert choice[field] == value


def test_leases_and_logprobs_are_told() -> None:
    writer = CompletionWriter(Envelope("1", 5, "m", 1, None))
    writer.events(0, outputs("a"), Tally(3))
    lent = outputs("b")
    lent.kv_transfer_params = {"lease_id": "x"}
    assert read(writer.events(0, lent, Tally(3)))["kv_transfer_params"] == {"lease_id": "x"}
    rated = outputs("c")
    rated.outputs[0].logprobs = [{7: Logprob(-0.5, 1, "c")}]
    [choice] = read(writer.events(0, rated, Tally(3)))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]
