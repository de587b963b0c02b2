"""What the official client does not show: bytes of streams, headers, ids, failures, disconnects."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.openai import exchange
from diptych_protocol import (
    ClientClosedError,
    EngineDeadError,
    EngineGenerateError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestOutputKind,
    UnsupportedFeatureError,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": "abcdef", **changes}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": "hi"}], **changes}


def events(text: str) -> list[Any]:
    """The data of each server-sent event; the closing [DONE] as it is."""
    lines = text.removesuffix("\n\n").split("\n\n")
    data = [line.removeprefix("data: ") for line in lines]
    assert all(line.startswith("data: ") for line in lines)
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_stream_is_one_event_a_token_and_done(http_socket: httpx.AsyncClient) -> None:
    answer = await http_socket.post(COMPLETIONS, json=completion(max_tokens=4, stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "b", "c", "d"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
    assert all("usage" not in c for c in chunks)


async def test_a_chunk_has_one_choice_and_the_first_of_each_its_role(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post(CHAT, json=chat(max_tokens=2, n=2, stream=True))
    *chunks, _ = events(answer.text)
    told = [(c["index"], c["delta"].get("role")) for chunk in chunks for c in chunk["choices"]]
    assert told == [(0, "assistant"), (1, "assistant"), (0, None), (1, None)]
    assert len(chunks) == len(told)


async def test_continuous_usage_counts_up_in_every_chunk(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await http.post(
        COMPLETIONS, json=completion(max_tokens=3, stream=True, stream_options=options)
    )
    *chunks, _ = events(answer.text)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_every_parameter_reaches_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    given = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -4,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "repetition_penalty": 1.2,
        "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True,
        "min_tokens": 1, "max_tokens": 3, "skip_special_tokens": False,
    }  # fmt: skip
    answer = await http.post(
        COMPLETIONS,
        json=completion(**given, stop="zz", logprobs=2, priority=-5, cache_salt="pepper"),
        headers={"X-Request-Id": "job-7"},
    )
    assert answer.status_code == 200, answer.text
    ((request_id, params, priority, prompt),) = engine.seen
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.logprobs) == (["zz"], 2)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert (request_id, priority, prompt["cache_salt"]) == ("job-7", -5, "pepper")


async def test_defaults_are_those_of_the_openai_api(http: httpx.AsyncClient, engine: Any) -> None:
    await http.post(COMPLETIONS, json=completion())
    await http.post(CHAT, json=chat())
    await http.post(CHAT, json=chat(max_tokens=5, max_completion_tokens=6, logprobs=True))
    asked = [(p.max_tokens, p.temperature, p.logprobs) for _, p, _, _ in engine.seen]
    assert asked == [(16, 1.0, None), (None, 1.0, None), (6, 1.0, 0)]


async def test_messages_become_what_templates_know(http: httpx.AsyncClient, engine: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": []},
    ]
    await http.post(CHAT, json=chat(messages=turns, add_generation_prompt=False))
    rendered = engine.renderer.decode(engine.seen[0][3]["prompt_token_ids"])
    assert rendered == "system: be brief\nuser: one\ntwo\nassistant: ok\n"


BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]


async def test_an_answer_that_has_begun_goes_on(http: httpx.AsyncClient, engine: Any) -> None:
    for more in ({}, {"add_generation_prompt": False}):
        sent = chat(messages=BEGUN, continue_final_message=True, **more)
        assert (await http.post(CHAT, json=sent)).status_code == 200
    for *_, prompt in engine.seen:
        rendered = engine.renderer.decode(prompt["prompt_token_ids"])
        assert rendered == "user: hi\nassistant: It is"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": "yes"}, "continue_final_message"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_contradicts_an_answer_that_goes_on_is_named(
    http: httpx.AsyncClient, more: dict[str, Any], param: str
) -> None:
    sent = chat(messages=BEGUN, **{"continue_final_message": True, **more})
    answer = await http.post(CHAT, json=sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_infinitely_unlikely_tokens_can_be_reported(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, json=chat(max_tokens=1, logprobs=True, top_logprobs=4))
    top = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.5, -1.0, -9999.0, -9999.0]


async def test_request_ids_are_kept_or_made(http: httpx.AsyncClient, engine: Any) -> None:
    kept = await http.post(CHAT, json=chat(), headers={"X-Request-Id": "abc~1"})
    assert kept.headers["x-request-id"] == "abc~1"
    assert kept.json()["id"] == "chatcmpl-abc~1"
    made = [(await http.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    batch = completion(prompt=["a", "b"])
    await http.post(COMPLETIONS, json=batch, headers={"X-Request-Id": "b"})
    assert [seen[0] for seen in engine.seen] == ["abc~1", "b-0", "b-1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_routers_facts_become_headers(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    engine.facts = {
        "prefill": "p-1", "reason": "long prompt\r\nx: y", "bad name": "z", "n": 3,
        "decode_engine": "d-2",
    }  # fmt: skip
    answer = await http.post(CHAT, json=chat(stream=stream))
    ours = {k: v for k, v in answer.headers.items() if k.startswith("x-diptych-")}
    assert ours == {
        "x-diptych-prefill": "p-1",
        "x-diptych-reason": "long prompt??x: y",
        "x-diptych-decode-engine": "d-2",
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_kv_transfer_params_go_in_and_come_out(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    engine.answer_kv_params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    body = completion(kv_transfer_params=asked, max_tokens=1, stream=stream)
    answer = await http.post(COMPLETIONS, json=body)
    final = events(answer.text)[-2] if stream else answer.json()
    assert final["kv_transfer_params"] == engine.answer_kv_params
    sent = engine.seen[0][1].extra_args["kv_transfer_params"]
    assert sent == {"do_remote_decode": True, "do_remote_prefill": False}, "no default is added"


FAILURES = [
    (InvalidRequestError("no such adapter", param="model"), 400, "invalid_request_error", None),
    (EngineOverloadedError("too many wait"), 503, "server_error", "overloaded"),
    (ClientClosedError("closed"), 503, "server_error", "shutting_down"),
    (EngineGenerateError("KV was lost"), 500, "server_error", "engine_error"),
    (EngineDeadError("core died: signal 9"), 500, "server_error", "engine_dead"),
    (UnsupportedFeatureError("no LoRA"), 501, "server_error", "unsupported"),
    (ZeroDivisionError("secret"), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "kind", "code"), FAILURES, ids=lambda v: type(v).__name__
)
async def test_failures_before_the_first_token_have_their_status(
    http: httpx.AsyncClient,
    engine: Any,
    failure: Exception,
    status: int,
    kind: str,
    code: str | None,
    stream: bool,
) -> None:
    engine.refusal = failure
    answer = await http.post(CHAT, json=chat(stream=stream))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
    assert "secret" not in error["message"]
    assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.parametrize("failure", [EngineGenerateError("KV was lost"), "error"])
async def test_contract_M02_a_failed_generation_is_never_a_normal_answer(
    http: httpx.AsyncClient, engine: Any, failure: Any
) -> None:
    engine.failure = failure
    for prompt in ("hello", ["hello", "world"]):
        whole = await http.post(COMPLETIONS, json=completion(prompt=prompt))
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "engine_error"
        streamed = await http.post(COMPLETIONS, json=completion(prompt=prompt, stream=True))
        assert streamed.status_code == 200
        *chunks, last = events(streamed.text)
        assert last["error"]["code"] == "engine_error"
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    await until(lambda: not engine.running)


@pytest.mark.parametrize("prompt", ["hello", ["hello", "world"]], ids=["one", "batch"])
@pytest.mark.parametrize("stream", [False, True], ids=["waiting", "streaming"])
async def test_a_client_that_leaves_ends_its_requests_in_the_engine(
    http_socket: httpx.AsyncClient, engine: Any, stream: bool, prompt: Any
) -> None:
    http = http_socket
    count = 1 if isinstance(prompt, str) else len(prompt)
    if not stream:
        engine.gate.clear()
    body = completion(prompt=prompt, max_tokens=10**9, stream=stream)
    request = http.build_request("POST", COMPLETIONS, json=body)
    sending = asyncio.create_task(http.send(request, stream=True))
    if stream:
        answer = await sending
        await anext(answer.aiter_bytes())
        assert len(engine.running) == count
        engine.gate.clear()
        await answer.aclose()
    else:
        await until(lambda: len(engine.running) == count)
        sending.cancel()
    await until(lambda: len(engine.left_early) == count)
    assert not engine.running


async def test_a_client_that_stops_reading_is_given_up(
    engine: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange, "WRITE_TIMEOUT_S", 0.2)
    body = json.dumps(completion(max_tokens=10**9, stream=True, n=100)).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    async with serve(build_app(engine)) as url:
        address = httpx.URL(url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.host, address.port))
            client.sendall(head.encode() + body)
            await until(lambda: bool(engine.left_early))
    assert "stopped reading" in caplog.text


async def test_large_prompts_are_tokenised_beside_the_event_loop(
    http: httpx.AsyncClient, engine: Any
) -> None:
    engine.max_model_len = 40_000
    answer = await http.post(COMPLETIONS, json=completion(prompt="x" * 20_000, max_tokens=2))
    assert answer.json()["usage"]["prompt_tokens"] == 20_000


async def test_probes_tell_the_state_of_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    for path in ("/health", "/live", "/ping"):
        assert (await http.get(path)).json() == {"status": "ok"}
    engine.illness = EngineDeadError("the core was killed by signal 9")
    sick = await http.get("/health")
    assert sick.status_code == 503
    assert sick.json() == {"status": "unhealthy", "reason": "the core was killed by signal 9"}
    assert (await http.get("/version")).json()["version"]
    assert (await http.head("/health")).content == b""
    assert (await http.get("/live")).status_code == 200, "being unhealthy is no reason to restart"
