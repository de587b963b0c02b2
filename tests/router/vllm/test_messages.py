"""What a router asks of a vLLM server, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_kit.fake_server import DONE, data, event
from vllm_kit.sent import request

from diptych_protocol import EngineCoreRequest, FinishReason
from diptych_protocol.sampling import StructuredOutputsParams
from diptych_protocol.wire import ErrorKind
from diptych_router.engines.vllm.answer_stream import (
    MAX_EVENT_BYTES,
    AnswerStream,
    MalformedStreamError,
    refusal,
)
from diptych_router.engines.vllm.messages import cannot_go_on, generate_body

CONTEXT = 64


def asked(sent: EngineCoreRequest) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(generate_body(sent, CONTEXT))
    return body


def test_all_that_shapes_the_tokens_is_sent_and_stop_strings_are_not() -> None:
    body = asked(
        request(
            max_tokens=9, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=0.2,
            frequency_penalty=0.3, repetition_penalty=1.1, seed=3, stop=["x"], stop_token_ids=[7],
            ignore_eos=True, min_tokens=2, logit_bias={4: 1.0}, bad_words=["no"],
        )
    )  # fmt: skip
    assert body == {
        "request_id": "r/1", "token_ids": list(range(8)), "stream": True, "cache_salt": "s",
        "sampling_params": {
            "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
            "seed": 3, "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2,
            "logit_bias": {"4": 1.0}, "bad_words": ["no"], "detokenize": False,
        },
    }  # fmt: skip


def test_another_engine_goes_on_after_the_tokens_so_far() -> None:
    body = asked(request(50, 51, 52, max_tokens=9, min_tokens=4, seed=10))
    assert body["token_ids"] == [*range(8), 50, 51, 52]
    params = body["sampling_params"]
    assert (params["max_tokens"], params["min_tokens"]) == (6, 1)
    assert params["seed"] == 13, "the numbers of the first three tokens are not drawn again"


@pytest.mark.parametrize(
    ("wanted", "prompt", "expected"), [(None, 8, 56), (100, 8, 56), (1, 63, 1)]
)
def test_no_more_is_asked_for_than_the_context_holds(
    wanted: int | None, prompt: int, expected: int
) -> None:
    body = asked(request(prompt=prompt, max_tokens=wanted))
    assert body["sampling_params"]["max_tokens"] == expected


def test_a_form_is_sent_with_what_is_known_of_the_reasoning() -> None:
    sent = request(structured_outputs=StructuredOutputsParams(regex="a+"))
    sent.reasoning_ended = True
    body = asked(sent)
    assert body["sampling_params"]["structured_outputs"] == {"regex": "a+"}
    assert body["reasoning_ended"] is True


@pytest.mark.parametrize(
    ("done", "form", "cut"),
    [((), True, False), ((5,), False, False), ((5,), True, True)],
)
def test_only_an_answer_with_a_form_cannot_go_on(
    done: tuple[int, ...], form: bool, cut: bool
) -> None:
    outputs = StructuredOutputsParams(json_object=True) if form else None
    assert cannot_go_on(request(*done, structured_outputs=outputs)) is cut


# --- answers ----------------------------------------------------------------------------------


def stream(**params: Any) -> AnswerStream:
    return AnswerStream(request(**params), max_tokens=8, vocab_size=64)


@given(st.lists(st.integers(1, 300), max_size=40))
def test_events_are_whole_however_their_bytes_arrive(sizes: list[int]) -> None:
    parts = b": a comment\r\n" + event(5) + event(6, 7) + event(8, finish="length")
    content = parts + data({"choices": [], "usage": {"prompt_tokens": 1}}) + DONE
    answer, outputs = stream(), []
    for size in [*sizes, len(content)]:
        outputs += answer.feed(content[:size])
        content = content[size:]
    assert [output.new_token_ids for output in outputs] == [[5], [6, 7], [8]]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert (answer.ended, answer.is_whole) == (True, True)


def candidates(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"token_id": token, "logprob": -float(rank), "rank": rank} for token, rank in pairs]


@pytest.mark.parametrize(
    ("asked_for", "sent", "row"),
    [
        (0, [(9, 4)], [9]),
        (2, [(9, 4), (1, 1), (2, 2)], [9, 1, 2]),
        (2, [(2, 2), (1, 1), (3, 3)], [2, 1, 2]),
        (1, [(1, 1), (2, 2)], [1, 1]),
    ],
)
def test_log_probabilities_are_the_tokens_own_and_then_the_likeliest(
    asked_for: int, sent: list[tuple[int, int]], row: list[int]
) -> None:
    [own, *_] = told = candidates(*sent)
    content = {"content": [{**own, "top_logprobs": told}]}
    [output] = stream(logprobs=asked_for).feed(event(own["token_id"], logprobs=content))
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids == [row]
    assert output.new_logprobs.sampled_token_ranks == [own["rank"]]


@pytest.mark.parametrize(
    "content",
    [
        b"<html>\n",
        b"data: {\n",
        b"data: []\n",
        event(-1),
        event(64),
        event(*range(9)),
        b"data: " + b" " * MAX_EVENT_BYTES + b"{}\n",
        b"x" * (MAX_EVENT_BYTES + 1),
    ],
)
def test_what_is_no_answer_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedStreamError):
        stream().feed(content)


def test_an_answer_without_the_log_probabilities_asked_for_fails() -> None:
    [output] = stream(logprobs=1).feed(event(5))
    assert output.finish_reason is FinishReason.ERROR
    assert "log-probabilities" in str(output.error)


def test_an_end_for_an_unknown_reason_is_a_failure() -> None:
    [output] = stream().feed(event(5, finish="repetition"))
    assert output.finish_reason is FinishReason.ERROR
    assert "repetition" in str(output.error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, ErrorKind.REFUSED),
        (404, ErrorKind.REFUSED),
        (429, ErrorKind.OVERLOADED),
        (500, ErrorKind.FAULT),
        (503, ErrorKind.OVERLOADED),
    ],
)
def test_an_error_says_whether_to_try_again(code: int, kind: ErrorKind) -> None:
    error = {"error": {"message": "no", "param": "logprobs", "code": code}}
    [in_stream] = stream().feed(data(error))
    by_status = refusal("r/1", code, msgspec.json.encode(error))
    for output in (in_stream, by_status):
        assert (output.error_kind, output.error_param) == (kind, "logprobs")
        assert output.error == "vLLM: no"


def test_a_refusal_in_other_words_still_says_the_status() -> None:
    assert refusal("r/1", 502, b"<html>").error == "vLLM: status 502"
