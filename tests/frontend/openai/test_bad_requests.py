"""Whatever is wrong with a request, the answer is a 4xx that says where."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_frontend.openai import asgi
from diptych_protocol import UnsupportedFeatureError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = "application/json"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "echo", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "echo", "prompt": "hi"},
}
MISSING = object()


def body(path: str, **changes: Any) -> dict[str, Any]:
    merged = BASE[path] | changes
    return {name: value for name, value in merged.items() if value is not MISSING}


def messages(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(turns)}


BOTH = [
    {"model": MISSING},
    {"model": 5},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"temperature": 101},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"top_k": 2**70},
    {"min_p": 2},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"seed": 2**64},
    {"seed": 1.5},
    {"n": 0},
    {"n": 1000},
    {"n": True},
    {"max_tokens": -1},
    {"max_tokens": "5"},
    {"min_tokens": -1},
    {"min_tokens": 9, "max_tokens": 8},
    {"stop": [""]},
    {"stop": ["a"] * 17},
    {"stop": "x" * 2000},
    {"stop": [1]},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": [2**64]},
    {"stop_token_ids": [1] * 257},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include": True}, "stream": True},
    {"ignore_eos": 1},
    {"priority": "high"},
    {"cache_salt": ""},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"five": 1}},
    {"logit_bias": [5]},
    {"bad_words": [""]},
    {"response_format": {"type": "json"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "odd"}},
        }
    },
    {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "integer", "minimum": 2**70}},
        }
    },
    {"structured_outputs": {"json": {"enum": [-(2**64)]}}},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"shape": "round"}},
    {"guided_choice": []},
    {"guided_regex": "("},
    {"guided_json": {"type": "odd"}},
    {"guided_grammar": "start: nothing", "structured_outputs": {"regex": "a"}},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": 1, "stream": True},
    {"kv_transfer_params": []},
    {"kv_transfer_params": {"do_remote_decode": "yes"}},
    {"kv_transfer_params": {"do_remote_prefill": True}},
    {"kv_transfer_params": {"do_remote_decode": True}, "n": 2},
    {"no_such_field": 1},
    {"no\nsuch `field": 1},
]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL_OF_NO_JSON = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
ONLY = {
    CHAT: [
        {"messages": MISSING},
        {"messages": []},
        {"messages": "hi"},
        messages({"role": "robot", "content": "hi"}),
        messages({"role": "user"}),
        messages({"role": "user", "content": None}),
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        messages({"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}),
        messages({"role": "user", "content": "x" * 3000}),
        {"top_logprobs": 3},
        {"top_logprobs": 21, "logprobs": True},
        {"logprobs": 3},
        {"max_completion_tokens": 0},
        {"max_tokens": 0},
        {"echo": True},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "none"}}]},
        {"tools": [TOOL] * 200},
        {"tool_choice": "sometimes", "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"const": 2**70}}}
            ],
            "tool_choice": "required",
        },
        {"tool_choice": "required"},
        messages({"role": "assistant", "content": None}),
        messages({"role": "assistant", "tool_calls": [CALL_OF_NO_JSON]}),
        {"functions": [{"name": "f"}]},
        {"reasoning_effort": "much"},
        {"tools": [TOOL | {"odd": 1}]},
        {"modalities": ["text", "audio"]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": [1]},
        {"include_reasoning": 1},
        messages({"role": "user", "content": "a", "reasoning_content": "b"}),
        {"prompt": "hi"},
    ],
    COMPLETIONS: [
        {"prompt": MISSING},
        {"prompt": None},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", 1]},
        {"prompt": [1, True]},
        {"prompt": [-1]},
        {"prompt": [300]},
        {"prompt": [[2**64]]},
        {"prompt": "x" * 3000},
        {"prompt": ["a"] * 1025},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"best_of": 2},
        {"echo": "yes"},
        {"suffix": "end"},
        {"messages": []},
    ],
}
CASES = [(p, c) for p in BASE for c in BOTH] + [(p, c) for p, cs in ONLY.items() for c in cs]


def case_name(value: Any) -> str:
    if isinstance(value, str):
        return value.removeprefix("/v1/").split("/")[0]
    return ",".join(f"{k}={'missing' if v is MISSING else repr(v)[:24]}" for k, v in value.items())


@each(("path", "changes"), CASES, ids=case_name)
async def test_a_wrong_field_is_named(
    strict_http: httpx.AsyncClient, engine: Any, path: str, changes: dict[str, Any]
) -> None:
    answer = await strict_http.post(path, json=body(path, **changes))
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert re.split(r"[.\[]", error["param"])[0] == next(iter(changes))
    assert error["message"]
    assert "$" not in error["message"] or error["param"] == "kv_transfer_params"
    assert not engine.seen


@pytest.mark.parametrize(
    ("path", "changes", "choices"),
    [
        (CHAT, messages({"role": "user", "content": [{"type": "input_audio"}]}), "text, image_url"),
        (CHAT, messages({"role": "boss"}), "assistant, developer, system, tool, user"),
        (COMPLETIONS, {"prompt": "hi", "json_schemas": "loose"}, "exact, lenient"),
        ("/v1/responses", {"input": [{"type": "audio"}]}, "message, function_call"),
    ],
    ids=["a kind of object", "a word", "a word at the top", "one of another API"],
)
async def test_what_is_no_choice_is_told_the_choices(
    http: httpx.AsyncClient, path: str, changes: dict[str, Any], choices: str
) -> None:
    answer = await http.post(path, json={"model": "echo"} | changes)
    assert answer.status_code == 400
    assert f"; it may be {choices}" in answer.json()["error"]["message"]


NOT_JSON = {
    "nothing": b"",
    "half": b'{"model": "echo", "prompt": "hi',
    "a form": b"model=echo&prompt=hi",
    "not UTF-8": b'{"model": "echo", "prompt": "\xff"}',
    "half a surrogate pair": b'{"model": "echo", "prompt": "\\ud800"}',
    "not an object": b"[1, 2]",
    "NaN": b'{"model": "echo", "prompt": "hi", "temperature": NaN}',
    "deep": b'{"model": "echo", "prompt": "hi", "echo": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
async def test_a_body_that_is_not_a_json_object_is_refused(
    http: httpx.AsyncClient, content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    answer = await http.post(COMPLETIONS, content=content, headers=headers)
    assert answer.status_code == 400
    assert "body" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(NOT_JSON["half a surrogate pair"], "surrogate pair"), (NOT_JSON["half"], "truncated"),
     (b'{"prompt": "\\ud8', "truncated"), (b'{"prompt": "\\ud800 and more"}', "surrogate pair")],
)  # fmt: skip
async def test_half_a_surrogate_pair_is_not_taken_for_half_a_body(
    http: httpx.AsyncClient, content: bytes, said: str
) -> None:
    answer = await http.post(COMPLETIONS, content=content, headers={"content-type": JSON})
    assert said in answer.json()["error"]["message"]


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({name for _, changes in CASES for name in changes})  # type: ignore[attr-defined]


@settings(max_examples=200)
@given(path=st.sampled_from(sorted(BASE)), changes=st.dictionaries(st.sampled_from(FIELDS), JUNK))
def test_no_json_in_any_field_is_the_servers_fault(
    echo_app: Any, path: str, changes: dict[str, Any]
) -> None:
    content = json.dumps(BASE[path] | changes, allow_nan=False).encode()
    status = asyncio.run(status_of(echo_app, path, content))
    assert status in (200, 400, 404)


async def status_of(app: Any, path: str, content: bytes | AsyncIterator[bytes]) -> int:
    """The status with which the app answers, without a socket between."""
    headers = {"content-type": "application/json"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return (await client.post(path, content=content, headers=headers)).status_code


async def test_each_refusal_before_the_body_has_its_status(http: httpx.AsyncClient) -> None:
    as_text = {"content-type": "text/plain"}
    large = json.dumps(body(COMPLETIONS, prompt="x" * (64 << 10)))
    for request, status, code in (
        (http.build_request("POST", COMPLETIONS, content="{}", headers=as_text), 415, None),
        (http.build_request("POST", COMPLETIONS, content=large), 413, "body_too_large"),
        (http.build_request("POST", COMPLETIONS, content=pieces(large)), 413, "body_too_large"),
        (http.build_request("GET", COMPLETIONS), 405, None),
        (http.build_request("DELETE", "/v1/models"), 405, None),
        (http.build_request("GET", "/nowhere"), 404, "not_found"),
        (http.build_request("POST", "/v1/nothing", json={}), 404, "not_found"),
    ):
        answer = await http.send(request)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["code"] == code
    assert (await http.get(CHAT)).headers["allow"] == "POST"


async def test_a_body_that_is_too_large_is_told_so_also_if_its_end_never_comes(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "REST_TIMEOUT_S", 0.2)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x" * (65 << 10)
        await asyncio.Event().wait()

    assert await status_of(app, COMPLETIONS, stalled()) == 413


@pytest.mark.parametrize(
    ("encoded", "headers", "param"),
    [
        (gzip.compress(b"{}"), {"content-encoding": "gzip"}, "Content-Encoding"),
        (b"{}", {"content-encoding": "gzip"}, "Content-Encoding"),
        ("{}".encode("utf-16"), {}, "Content-Type"),
        ("{}".encode("utf-16-le"), {"content-type": JSON + '; charset="UTF-16"'}, "Content-Type"),
        ("{}".encode("utf-8-sig"), {"content-type": JSON + "; charset=utf-8"}, "Content-Type"),
    ],
    ids=["gzip", "no gzip", "UTF-16 with a mark", "UTF-16", "UTF-8 with a mark"],
)
async def test_a_body_in_another_encoding_is_told_how_to_come(
    http: httpx.AsyncClient, encoded: bytes, headers: dict[str, str], param: str
) -> None:
    headers = {"content-type": JSON, **headers}
    answer = await http.post(CHAT, content=encoded, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, param)
    assert answer.json()["error"]["message"].startswith("send the body ")


async def test_a_number_that_no_field_can_have_is_refused_by_its_field(
    http: httpx.AsyncClient,
) -> None:
    content = json.dumps(body(COMPLETIONS, temperature=7)).replace("7", "1e400")
    answer = await http.post(COMPLETIONS, content=content, headers={"content-type": JSON})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def pieces(text: str) -> Any:
    """A body without a declared length."""
    for start in range(0, len(text), 10_000):
        yield text[start : start + 10_000].encode()


async def test_a_prompt_without_room_for_an_answer_is_refused(
    http: httpx.AsyncClient, engine: Any
) -> None:
    limit = engine.max_model_len
    full = await http.post(COMPLETIONS, json=body(COMPLETIONS, prompt="x" * limit))
    assert full.json()["error"]["code"] == "context_length_exceeded"
    assert str(limit) in full.json()["error"]["message"]
    nearly = await http.post(COMPLETIONS, json=body(COMPLETIONS, prompt="x" * (limit - 1)))
    assert nearly.status_code == 200


async def test_neutral_values_of_unsupported_fields_pass(http: httpx.AsyncClient) -> None:
    shared = {
        "logit_bias": {}, "response_format": {"type": "text"}, "echo": False, "user": "me",
        "stop": None, "logprobs": None, "temperature": None, "n": None, "seed": None,
        "stream": None, "max_tokens": None, "use_beam_search": False, "length_penalty": 1,
    }  # fmt: skip
    chat = {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "store": False,
        "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"],
        "prompt_cache_key": "k", "safety_identifier": "s", "verbosity": "medium",
    }  # fmt: skip
    for path, extra in ((COMPLETIONS, {"best_of": 1, "suffix": None}), (CHAT, chat)):
        answer = await http.post(path, json=body(path, **shared, **extra))
        assert answer.status_code == 200, answer.text


async def test_only_so_much_of_a_request_is_quoted_in_its_refusal(
    strict_http: httpx.AsyncClient,
) -> None:
    for changes in ({"y" * 50_000: 1}, {"stop": "y" * 50_000}, {"model": "y" * 50_000}):
        answer = await strict_http.post(COMPLETIONS, json=body(COMPLETIONS, **changes))
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 2000


@pytest.mark.parametrize("request_id", ["", "two words", "x" * 129, "caf\u00e9"])
async def test_a_bad_request_id_is_refused(http: httpx.AsyncClient, request_id: str) -> None:
    headers = {b"X-Request-Id": request_id.encode()}
    answer = await http.post(CHAT, json=body(CHAT), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Id"
    assert answer.headers["x-request-id"]


async def test_an_engine_that_does_not_pool_says_so(http: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = UnsupportedFeatureError("this model has no vectors")
    answer = await http.post("/v1/embeddings", json={"model": "echo", "input": ["a", "b"]})
    assert answer.status_code == 501
    assert answer.json()["error"]["code"] == "unsupported"
