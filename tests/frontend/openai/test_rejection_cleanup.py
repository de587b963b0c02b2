"""A refused hand-off is reported to the engine, whatever the reason, and only then."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.openai.promised_prefill import MAX_VALUES, PromiseFinder, promised_prefill
from diptych_protocol import EngineGenerateError, EngineOverloadedError

PATHS = ["/v1/completions", "/v1/chat/completions"]
PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "p-1",
    "remote_request_id": "r-1",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 40,
    "lease_id": "00" * 16,
    "epoch": "e",
    "compat": "c",
    "expires_at": 1,
    "proof": "00",
}


def body(path: str, **changes: Any) -> dict[str, Any]:
    content = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    return {"model": "echo", **content, "kv_transfer_params": PARAMS, **changes}


async def post(http: httpx.AsyncClient, path: str, content: Any, request_id: str = "r-1") -> int:
    answer = await http.post(path, json=content, headers={"X-Request-Id": request_id})
    return answer.status_code


async def settled(engine: Any, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(engine.rejected) < count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -1},
        {"allowed_token_ids": [1]},
        {"model": "nobody"},
        {"n": 2},
        {"prompt": "x" * 3000, "messages": [{"role": "user", "content": "x" * 3000}]},
        {"stream_options": {}},
        {"kv_transfer_params": {**PARAMS, "remote_host": None}},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_every_refusal_by_the_server_is_reported(
    http: httpx.AsyncClient, engine: Any, path: str, changes: dict[str, Any]
) -> None:
    if "prompt" in changes:
        changes = {"messages" if "chat" in path else "prompt": changes[
            "messages" if "chat" in path else "prompt"
        ]}  # fmt: skip
    content = body(path, **changes)
    assert 400 <= await post(http, path, content) < 500
    await settled(engine, 1)
    assert engine.rejected == [("r-1", content["kv_transfer_params"])]


async def test_refusals_on_other_routes_and_types_are_reported(
    http: httpx.AsyncClient, engine: Any
) -> None:
    assert await post(http, "/v1/nothing", body("")) == 404
    assert await post(http, "/v1/models", body("")) == 405
    as_text = {"content-type": "text/plain"}
    answer = await http.post(PATHS[0], content=json.dumps(body("")), headers=as_text)
    assert answer.status_code == 415
    assert await post(http, PATHS[0], body(PATHS[0]), "x" * 200) == 400
    await settled(engine, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_the_engine_before_admission_is_reported(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    engine.refusal = EngineOverloadedError("full")
    assert await post(http, PATHS[0], body(PATHS[0], stream=stream)) == 503
    await settled(engine, 1)


async def test_what_an_engine_admitted_is_left_to_the_engine(
    http_socket: httpx.AsyncClient, engine: Any
) -> None:
    http = http_socket
    assert await post(http, PATHS[0], body(PATHS[0])) == 200
    engine.refusal = EngineGenerateError("the transfer failed")
    assert await post(http, PATHS[0], body(PATHS[0])) == 500
    engine.refusal = None
    decode = body(PATHS[0], temperature=-1, kv_transfer_params={"do_remote_decode": True})
    assert await post(http, PATHS[0], decode) == 400
    assert await post(http, PATHS[0], {"model": "echo"}) == 400
    # A refusal that is reported comes after all of these on the same connection.
    assert await post(http, PATHS[0], body(PATHS[0], temperature=-1), "last") == 400
    await settled(engine, 1)
    assert [request_id for request_id, _ in engine.rejected] == ["last"]


@pytest.mark.parametrize("trouble", ["it raises", "it hangs"])
async def test_trouble_with_the_report_does_not_touch_the_answer(
    engine: Any, serve: Any, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    called = asyncio.Event()

    async def notify(*args: Any, **kwargs: Any) -> None:
        called.set()
        if trouble == "it hangs":
            await asyncio.Event().wait()
        raise ConnectionError("P is gone")

    engine.notify_kv_transfer_request_rejected = notify
    async with (
        serve(build_app(engine), drain_timeout_s=0.1) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        for _ in range(2):
            assert await post(http, PATHS[0], body(PATHS[0], temperature=-1)) == 400
            await asyncio.wait_for(called.wait(), PATIENCE_S)
            called.clear()
    if trouble == "it raises":
        assert "P is gone" in caplog.text


@given(st.data())
@settings(max_examples=200)
def test_a_promise_is_found_in_pieces_of_any_size(data: st.DataObject) -> None:
    """Also behind a text that speaks of it."""
    quoted = json.dumps({"kv_transfer_params": {"do_remote_prefill": True}})
    whole = json.dumps({"prompt": quoted + "x" * 50, "kv_transfer_params": PARAMS, "n": 1}).encode()
    whole = whole[: data.draw(st.integers(0, len(whole)), label="cut off at")]
    finder = PromiseFinder()
    rest = whole
    while rest:
        size = data.draw(st.integers(1, 100))
        finder.feed(rest[:size])
        rest = rest[size:]
    complete = whole.rfind(b"}") > whole.find(b"lease_id") > 0
    assert finder.found() == promised_prefill(whole) == (PARAMS if complete else None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'"kv_transfer_params": {"do_remote_prefill": true',
        b'{"kv_transfer_params": [' + b"[" * 100_000,
        b'{"kv_transfer_params": {"do_remote_prefill": ' + b"[" * 100_000,
        b'{"kv_transfer_params": {"do_remote_prefill": 1}',
        b'{"kv_transfer_params": {"do_remote_prefill": ' + b"9" * 10_000,
        b'{"kv_transfer_params": {"\xff": 1',
    ],
)
def test_in_rubbish_there_is_no_promise(body: bytes) -> None:
    assert promised_prefill(body) is None


@pytest.mark.parametrize("end", [b"]}}", b""], ids=["whole", "cut off"])
@pytest.mark.parametrize(("value", "count"), [(b"[]", MAX_VALUES), (b"1e300", 1000)])
def test_what_would_take_long_to_decode_is_not_looked_into(
    end: bytes, value: bytes, count: int
) -> None:
    """It happens on the event loop, after any refusal."""
    many = b",".join([value] * count)
    body = b'{"kv_transfer_params":{"do_remote_prefill":true,"x":[' + many + end
    assert promised_prefill(body) is None
